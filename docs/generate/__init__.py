"""The pages that are written by the build: recipes, commands and the Python API.

`docs/hooks.py` hands them to mkdocs. Each module here returns pages as `{path: Markdown}`, with
paths below `docs/`, so that a test can read them without a build.
"""
