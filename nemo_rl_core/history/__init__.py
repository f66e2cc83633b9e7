"""The runs' database: what ran, on what, from what, and what came of it.

One SQLite file in the store, `history.db`. A run writes it through `writer.HistoryWriter`; pages
and commands read it through `queries.History`. No run fails for it: it holds nothing that a later
run needs, and the manifest in each artifact's folder says again what matters most.
"""
