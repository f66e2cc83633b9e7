"""The DAGs: one a file, one screen each."""
