"""The runs' database: executions, nodes, values, artifacts and metrics.

One SQLite file in the store, `history.db`. A run writes it through `writer.HistoryWriter`; pages
and commands read it through `queries.History`. No run fails because of it: no later run needs it,
and the manifest in each artifact's folder repeats its most important part.
"""
