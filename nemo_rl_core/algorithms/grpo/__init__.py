"""Group-relative policy optimization."""
