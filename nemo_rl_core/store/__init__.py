"""The store: artifacts with their manifests, made once, locked, verified, never half there."""
