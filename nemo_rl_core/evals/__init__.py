"""Evaluation and comparison of checkpoints."""
