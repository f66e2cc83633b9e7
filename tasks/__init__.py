"""Typed, cached Flyte tasks: each connects, calls the core, and returns an artifact.

Importing this package alone costs nothing, so that `nemo-rl` is quick; `tasks.stage`, which every
task needs, moves flytekit's files into the store.
"""
