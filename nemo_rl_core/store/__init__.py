"""The store: artifacts with manifests, published atomically, locked and verified."""
