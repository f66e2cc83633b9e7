"""Checkpoints and their tensors: written atomically, read without unrestricted pickle."""
