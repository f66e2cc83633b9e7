"""One folder an algorithm: its config, its loss, its loop."""
