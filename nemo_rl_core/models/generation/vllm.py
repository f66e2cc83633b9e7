"""vLLM engines that take the options of NeMo RL's `VllmConfig`."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl_core.backends.decoding.requests import row_seeds
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.engine_environment import engine_environment
from nemo_rl_core.models.generation.options import VllmConfig, read_setup, read_vllm_setup

__all__ = ["VllmConfig", "VllmGeneration", "VllmGenerationWorker"]


class VllmGeneration(Generation):
    """vLLM engines over a cluster; running ones of the same model and size are reused.

    With `async_engine: true` the call returns a `StreamingGeneration` instead: one engine that also
    takes requests at any time (`submit`, `poll`), and new weights during generation.

    Args:
        cluster: A session with its running workers, or a custom cluster.
        config: A set-up, or the options of `VllmConfig`, with as many engines as fit in the cluster
            by default (`num_engines`).
        name: Name of the worker group.
        gate: Bounds of the proofs.
    """

    def __new__(cls, cluster: Any, config: Any, **options: Any) -> Any:
        """Returns the asynchronous engine if the options ask for it."""
        if cls is VllmGeneration and _is_asynchronous(config):
            from nemo_rl_core.models.generation.streaming import StreamingGeneration

            return StreamingGeneration(cluster, config, **options)
        return super().__new__(cls)

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        config: GenerationSetup | VllmConfig | Mapping[str, Any],
        *,
        name: str = "generation",
        gate: GateConfig | None = None,
    ) -> None:
        super().__init__(cluster, read_vllm_setup(cluster, config), name=name, gate=gate)


def _is_asynchronous(config: Any) -> bool:
    if isinstance(config, GenerationSetup):
        return False
    return bool({**config, **config.get("vllm_cfg", {})}.get("async_engine"))


class VllmGenerationWorker:
    """One vLLM engine in this process; `ray.remote` turns it into an actor.

    Args:
        model_name: A hub name, or a folder in the transformers layout.
        **options: Options of `VllmConfig`.
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
        """Completes `input_ids [B, T]`; without `input_lengths` rows are not padded.

        Args:
            input_ids: Prompts, padded on the right.
            **columns: Other columns of a `GenerationDatumSpec`.
        """
        num_rows, width = input_ids.shape
        others = {
            "input_lengths": torch.full((num_rows,), width),
            "seeds": row_seeds(self._seed, num_rows),
            **columns,
        }
        batch = BatchedDataDict({"input_ids": input_ids, **others})
        return self._backend.generate(batch, greedy=greedy)

    def update_weights(self, weights_handle: LinkSpec) -> str:
        """Receives one transfer of all weights; returns the digest of what arrived.

        Args:
            weights_handle: Handle of a link, to whose other end an `Endpoint` sends.
        """
        return self._backend.receive_weights(weights_handle, 0)

    def shutdown(self) -> None:
        """Ends the engine."""
        self._backend.shutdown()
