"""The training loop and its parts, shared by all algorithms."""
