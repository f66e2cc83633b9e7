"""vLLM's engine by the names of NeMo RL's `VllmConfig`."""

import os
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from nemo_rl_core.backends.decoding.requests import row_seeds
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync import LinkSpec
from nemo_rl_core.models.generation.engine import Generation, engine_environment
from nemo_rl_core.models.generation.options import read_setup


class VllmEngineConfig(TypedDict, total=False):
    """What `VllmConfig.vllm_cfg` says of an engine."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    skip_tokenizer_init: bool
    async_engine: bool
    precision: str
    load_format: str


class VllmConfig(TypedDict, total=False):
    """A set-up by the names of NeMo RL's `VllmConfig`; `read_setup` maps them."""

    backend: str
    model_name: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    repetition_penalty: float
    do_sample: bool
    eos_token_id: int | list[int]
    pad_token_id: int
    stop_token_ids: list[int] | None
    stop_strings: list[str]
    vllm_cfg: VllmEngineConfig


class VllmGeneration(Generation):
    """vLLM engines over a cluster; running ones of the same model and size are reused.

    Args:
        cluster: A session with its running workers, or a cluster of your own.
        config: A set-up, or the options of `VllmConfig`: then there are as many engines as the
            cluster has room for, unless `num_engines` says another number.
        name: Of the worker group.
    """

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        config: GenerationSetup | VllmConfig | Mapping[str, Any],
        *,
        name: str = "generation",
    ) -> None:
        if isinstance(config, GenerationSetup):
            super().__init__(cluster, config, name=name)
            return
        owner = cluster if isinstance(cluster, RayVirtualCluster) else cluster.cluster
        options = {**config, **config.get("vllm_cfg", {})}
        options.pop("vllm_cfg", None)
        if "num_engines" not in options:
            ranks = options.get("tensor_parallel_size", 1) * options.get(
                "pipeline_parallel_size", 1
            )
            options["num_engines"] = max(1, owner.world_size // ranks)
        super().__init__(cluster, read_setup(options, VllmGenerationConfig), name=name)


class VllmGenerationWorker:
    """One vLLM engine in this process; `ray.remote` makes an actor of it.

    Args:
        model_name: A hub name, or a folder in the transformers layout.
        **options: Words of `VllmConfig`.
    """

    def __init__(self, model_name: str, **options: Any) -> None:
        from nemo_rl_core.backends.generation.vllm import VllmBackend

        setup = read_setup({"model_name": model_name, **options}, VllmGenerationConfig)
        os.environ.update(engine_environment(setup.config))  # before vLLM is imported
        self._seed = setup.seed
        self._backend = VllmBackend()
        self._backend.setup(setup)

    def generate(
        self, input_ids: torch.Tensor, *, greedy: bool = False, **columns: Any
    ) -> BatchedDataDict:
        """Completes `input_ids [B, T]`, whole rows unless `input_lengths` says else.

        Args:
            input_ids: Padded on the right.
            greedy: The likeliest token each time.
            **columns: The others of a `GenerationDatumSpec`.
        """
        num_rows, width = input_ids.shape
        given = {
            "input_lengths": torch.full((num_rows,), width),
            "seeds": row_seeds(self._seed, num_rows),
            **columns,
        }
        batch = BatchedDataDict({"input_ids": input_ids, **given})
        return self._backend.generate(batch, greedy=greedy)

    def update_weights(self, weights_handle: LinkSpec) -> str:
        """Takes one transfer of all weights; returns what arrived, digested.

        Args:
            weights_handle: Of a link at whose other end an `Endpoint` sends.
        """
        return self._backend.receive_weights(weights_handle, 0)

    def shutdown(self) -> None:
        """Ends the engine."""
        self._backend.shutdown()
