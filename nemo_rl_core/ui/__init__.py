"""The page: a store's history in a browser, read only and from this machine alone.

`app.py` puts it together; `pages/` has one module a page; `templates/` what they show. Every page
is whole without scripts but for the picture of a graph, whose text is the table beside it.
"""
