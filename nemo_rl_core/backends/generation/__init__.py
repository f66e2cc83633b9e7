"""Generation backends, by name."""
