"""Engines that are started from the name of a model: transformers and Megatron-core."""

import itertools
from pathlib import Path
from typing import Any, ClassVar

from nemo_rl_core.config.cluster import ClusterConfig, ShapeName
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, MegatronGenerationConfig
from nemo_rl_core.distributed.resources import count_gpus
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.options import EngineConfig, read_setup

_numbers = itertools.count(1)


class NamedGeneration(Generation):
    """An engine that is started from the name of its model; its workers start at once.

    Args:
        model_name: A hub name, or a folder in the transformers layout.
        cluster: Cluster or session of the workers; by default this machine.
        **options: Fields of the engine's config, and `dtype`, `max_model_len`, `stop_token_ids`,
            `pad_token_id`, `seed`.

    Raises:
        ConfigError: For an unknown option (suggests the nearest one) or an invalid value.
        ModelError: If the model does not exist.
    """

    config_class: ClassVar[type[EngineConfig]]

    def __init__(
        self,
        model_name: str | Path,
        cluster: ClusterSession | RayVirtualCluster | None = None,
        **options: Any,
    ) -> None:
        setup = read_setup({"model_name": str(model_name), **options}, self.config_class)
        config = setup.config
        shape: ShapeName = "cluster" if count_gpus() else "laptop"
        num_workers = config.num_engines * config.ranks_per_engine
        super().__init__(
            cluster or connect(ClusterConfig(shape=shape, num_workers=num_workers)),
            setup,
            name=f"{type(self).__name__} {next(_numbers)}",
        )


class HuggingFaceGeneration(NamedGeneration):
    """The generation loop of transformers: for models that vLLM does not support, or to compare."""

    config_class = HuggingFaceGenerationConfig


class MegatronGeneration(NamedGeneration):
    """Megatron-core's model, over tensor- and pipeline-parallel workers."""

    config_class = MegatronGenerationConfig
