"""Layout of engines over workers, and the key by which a running engine is reused."""

import hashlib
import json
from typing import Any

import numpy as np

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import (
    MegatronGenerationConfig,
    SamplingConfig,
    SplitEngine,
)
from nemo_rl_core.distributed.named_sharding import DATA, PIPELINE, TENSOR, NamedSharding

WITHIN_AN_ENGINE = (PIPELINE, TENSOR)


def engine_sharding(config: SamplingConfig) -> NamedSharding:
    """Lays out engines over the first bundles; ranks that communicate most are adjacent."""
    engines, ranks = config.num_engines, config.ranks_per_engine
    pipeline, tensor = 1, 1
    if isinstance(config, SplitEngine):
        pipeline, tensor = config.pipeline_parallel_size, config.tensor_parallel_size
    every_rank = np.arange(engines * ranks)
    if isinstance(config, MegatronGenerationConfig):  # the order of its groups
        return NamedSharding(
            every_rank.reshape(pipeline, engines, tensor), (PIPELINE, DATA, TENSOR)
        )
    return NamedSharding(every_rank.reshape(engines, pipeline, tensor), (DATA, PIPELINE, TENSOR))


def engine_key(setup: GenerationSetup) -> str:
    """Hashes architecture, size and sampling of an engine, but not the weights."""
    architecture: dict[str, Any] = json.loads((setup.model_folder / "config.json").read_text())
    described = json.dumps(architecture, sort_keys=True) + repr(
        (
            setup.config,
            setup.max_model_len,
            setup.stop_token_ids,
            setup.dtype,
            setup.seed,
            setup.isolation,
        )
    )
    return hashlib.sha256(described.encode()).hexdigest()
