"""How engines lie over their workers, and by what a running one is found again."""

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
    """Engines over the first bundles of their cluster; ranks that talk most lie side by side."""
    engines, ranks = config.num_engines, config.ranks_per_engine
    pipeline, tensor = 1, 1
    if isinstance(config, SplitEngine):
        pipeline, tensor = config.pipeline_parallel_size, config.tensor_parallel_size
    every_rank = np.arange(engines * ranks)
    if isinstance(config, MegatronGenerationConfig):  # whose groups are laid out so
        return NamedSharding(
            every_rank.reshape(pipeline, engines, tensor), (PIPELINE, DATA, TENSOR)
        )
    return NamedSharding(every_rank.reshape(engines, pipeline, tensor), (DATA, PIPELINE, TENSOR))


def engine_key(setup: GenerationSetup) -> str:
    """What an engine is started with: architecture, size and sampling, but not the weights."""
    architecture: dict[str, Any] = json.loads((setup.model_folder / "config.json").read_text())
    described = json.dumps(architecture, sort_keys=True) + repr(
        (setup.config, setup.max_model_len, setup.stop_token_ids, setup.dtype, setup.seed)
    )
    return hashlib.sha256(described.encode()).hexdigest()
