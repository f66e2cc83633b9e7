"""A generation engine that runs in a Ray worker."""

import hashlib
import json
from pathlib import Path
from typing import Any

from nemo_rl_core.backends.generation.base import GenerationSetup, get_generation_backend
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.weight_sync import compare_digests
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.models.policy import Policy


class VllmGeneration(GenerationInterface):
    """A vLLM engine; a running one of the same architecture and size is reused.

    Args:
        session: The cluster and its running workers.
        setup: Model, sampling and size. The weights of `setup.model_folder` are loaded.
        name: Of the worker group; engines of one name take each other's place.
    """

    def __init__(
        self, session: ClusterSession, setup: GenerationSetup, *, name: str = "generation"
    ) -> None:
        self._workers, is_new = session.workers(
            get_generation_backend(setup.config.backend),
            name=name,
            key=_engine_key(setup),
            env_vars=_engine_environment(setup.config),
        )
        if is_new:
            self._workers.run_all_workers_single_data("setup", setup)
        # Also in a new engine: weights then always take the same way, and give the same bits.
        self.load_weights(setup.model_folder)

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Completes `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        output: BatchedDataDict = self._workers.run_single_worker("generate", data, greedy=greedy)
        return output

    def prepare_for_generation(self) -> None:
        """Nothing to wake: on a CPU the engine keeps its memory."""

    def finish_generation(self) -> None:
        """Nothing to give back."""

    def update_weights(self, policy: Policy) -> None:
        """Takes over the policy's weights and compares checksums of what was sent and arrived.

        Raises:
            ConsistencyError: If they differ.
        """
        buckets, sent = policy.send_weights()
        received = self._workers.run_single_worker("update_weights", buckets)
        compare_digests(sent=sent, received=received)

    def load_weights(self, model_folder: Path) -> None:
        """Takes over the weights of a transformers folder of the same architecture."""
        self._workers.run_all_workers_single_data("load_weights", model_folder)

    def peak_memory_gib(self) -> float:
        """The most memory that the engine's process has held."""
        return float(sum(self._workers.run_all_workers_single_data("peak_memory_gib")))


def _engine_key(setup: GenerationSetup) -> str:
    """What an engine is started with: architecture, size and sampling, but not the weights."""
    architecture: dict[str, Any] = json.loads((setup.model_folder / "config.json").read_text())
    described = json.dumps(architecture, sort_keys=True) + repr(
        (setup.config, setup.max_model_len, setup.stop_token_ids, setup.dtype, setup.seed)
    )
    return hashlib.sha256(described.encode()).hexdigest()


def _engine_environment(config: GenerationConfig) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # The engine stays inside the worker's process, where weights arrive.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
