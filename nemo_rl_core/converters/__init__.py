"""Models from one form into another."""
