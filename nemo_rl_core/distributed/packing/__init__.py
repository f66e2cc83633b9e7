"""Which sequences share a micro-batch, and which rank computes it: plans from lengths alone."""
