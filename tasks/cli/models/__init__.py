"""Commands that convert, serve, promote, describe and evaluate models."""
