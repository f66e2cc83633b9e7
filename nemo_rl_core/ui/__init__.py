"""The web UI: a store's history in a browser, read-only and served only on this machine."""
