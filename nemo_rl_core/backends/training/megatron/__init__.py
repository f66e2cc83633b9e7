"""Megatron-core as a training backend: models, weights and steps over tensor and pipeline axes."""

from typing import Any

from nemo_rl_core.backends.training.megatron.cpu import import_uncompiled_where_cuda_is_absent
from nemo_rl_core.documented_names import documented

# Before all modules of this package, and therefore before Megatron's.
import_uncompiled_where_cuda_is_absent()


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
