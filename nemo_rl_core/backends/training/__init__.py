"""Training backends, by name."""
