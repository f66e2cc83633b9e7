"""Checkpoints and the tensors in them: written whole or not at all, read without pickle."""
