"""Transfer of weights from a policy's workers to an engine's, always with checksums."""
