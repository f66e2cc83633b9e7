"""Megatron-core as a training backend: models, weights and steps over tensor and pipeline axes."""
