"""Megatron-core as a training backend: models, weights and steps over tensor and pipeline axes."""

from nemo_rl_core.backends.training.megatron.cpu import import_uncompiled_where_cuda_is_absent

# Before all modules of this package, and therefore before Megatron's.
import_uncompiled_where_cuda_is_absent()
