"""The runs' database `history.db`: executions, nodes, values, artifacts and metrics.

Its errors never fail a run. Each artifact's manifest repeats the most important part.
"""
