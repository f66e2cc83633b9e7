"""How checkpoints are measured and compared."""
