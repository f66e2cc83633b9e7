"""Megatron-core as a training backend, with tensor, pipeline, context and expert parallelism."""

from typing import Any

from nemo_rl_core.backends.training.megatron.cpu import import_uncompiled_where_cuda_is_absent
from nemo_rl_core.documented_names import documented

# Called before any module of this package imports Megatron.
import_uncompiled_where_cuda_is_absent()


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
