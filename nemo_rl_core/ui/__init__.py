"""The web UI: a store's history in a browser, read only and served on this machine alone.

`app.py` has the routes, `pages/` one module per kind of page, `templates/` the HTML. Every page is
complete without scripts, except for the picture of a graph, which a table beside it repeats.
"""
