"""Engines that go on generating between calls."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.config.generation import SamplingConfig, VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation.balance import RequestBalance
from nemo_rl_core.models.generation.engine import WITHIN_AN_ENGINE, Generation
from nemo_rl_core.models.generation.options import VllmConfig, read_vllm_setup
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_unchanged
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.types import Completion

_LOG = logging.getLogger(__name__)
_SHARED_POLL_SECONDS = 0.02


class StreamingGeneration(Generation):
    """vLLM engines that take requests at any time, and new weights in the middle of them.

    A request goes to the engine with the fewest outstanding tokens. New weights reach all engines
    in one transfer, as one version.

    Samples may all be of older weights than the policy's, so that no step can compare them with it.
    So every transfer of weights ends with a proof, and begins with another: that each engine still
    computes as it did at the end of the one before.

    Args:
        cluster: A session with its running workers, or a cluster of your own.
        config: Model, sampling and size, of vLLM engines; as `VllmGeneration` takes it.
        name: Of the worker group.
        gate: The bounds of its proofs.

    Attributes:
        agreement: The largest `token_mult_prob_error` of an engine in the last proof; 1 is
            agreement.

    Raises:
        ConfigError: For another engine.
    """

    agreement: float

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        config: GenerationSetup | VllmConfig | Mapping[str, Any],
        *,
        name: str = "generation",
        gate: GateConfig | None = None,
    ) -> None:
        setup = read_vllm_setup(cluster, config)
        self._refuse_other_engines(setup.config)
        self._weight_version = 0
        super().__init__(cluster, setup, name=name, gate=gate)

    @staticmethod
    def _refuse_other_engines(config: SamplingConfig) -> None:
        if not isinstance(config, VllmGenerationConfig):
            raise ConfigError(
                "this engine cannot sample while a model trains",
                expected="generation.backend: vllm",
                got=getattr(config, "backend", type(config).__name__),
                fix="change the section generation, or leave out asynchronous (async_engine)",
            )

    @property
    def _backend(self) -> str:
        return "vllm_streaming"

    def _start(self) -> None:
        super()._start()
        self._balance = RequestBalance(self.num_engines)  # new engines know of no requests
        self._arrived: list[tuple[int, Completion]] = []

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """It is always ready."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """It goes on with what it was asked; there is no memory that it could give away."""

    def submit(self, names: Sequence[int], requests: BatchedDataDict) -> None:
        """Hands requests over and returns at once.

        Args:
            names: `B` of them, by which `poll` calls the completions.
            requests: As for `generate`, drawn under the temperature.

        Raises:
            ConsistencyError: If an engine, with the weights of a folder, computes otherwise than
                transformers does.
            WorkerLostError: If a worker is lost; see `restart`.
        """
        self._prove_folder()
        if self.num_engines > 1:
            self._collect(wait_seconds=0.0)  # what is done already is no load
        most = self._setup.config.max_new_tokens
        limits = requests.get("max_new_tokens", torch.full((requests.size,), most))
        shares = self._balance.assign(
            names,
            prompt_tokens=requests["input_lengths"].tolist(),
            new_tokens=limits.clamp(max=most).tolist(),
        )
        calls = []
        for engine, rows in enumerate(shares):
            if rows:
                batch = requests.select_indices(rows)
                own = [names[row] for row in rows]
                calls += self._calls(engine, "submit", names=own, batch=batch)
        self._finish(calls)

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """Completions that are done and were not returned before, by name.

        Args:
            wait_seconds: For the first of them.

        Raises:
            WorkerLostError: If a worker is lost; see `restart`.
        """
        if not self._arrived:
            busy = len(self._balance.busy)
            # Engines are asked together, so that one with nothing must not keep the others waiting.
            self._collect(
                wait_seconds=wait_seconds if busy == 1 else min(wait_seconds, _SHARED_POLL_SECONDS)
            )
        found, self._arrived = self._arrived, []
        return found

    def _collect(self, *, wait_seconds: float) -> None:
        """Asks all engines with outstanding requests for what is done."""
        calls = [
            self._workers.start_single_worker(
                "poll", rank=engine * self._ranks, wait_seconds=wait_seconds
            )
            for engine in self._balance.busy
        ]
        for name, completion in (each for answer in self._finish(calls) for each in answer):
            request = self._balance.settle(name)
            drawn = len(completion.token_ids)
            lengths = [(request.prompt_tokens if request else 0) + drawn]
            shape = model_shape(self._setup.model_folder)
            usage.count("generation", shape, lengths, num_generated=drawn)
            self._arrived.append((name, completion))

    def cancel(self, names: Sequence[int]) -> None:
        """Gives requests up; their completions may still come from the next `poll`."""
        self._ask_all("cancel", names=list(names))
        for name in names:
            self._balance.settle(name)

    @property
    def _ranks(self) -> int:
        return self._setup.config.ranks_per_engine

    def _calls(self, engine: int, method: str, **kwargs: Any) -> list[Any]:
        """Calls of all ranks of an engine."""
        first = engine * self._ranks
        return [
            self._workers.start_single_worker(method, rank=rank, **kwargs)
            for rank in range(first, first + self._ranks)
        ]

    def _finish(self, calls: Sequence[Any]) -> list[Any]:
        """Their answers; a worker that is stuck is lost, as one that does not `generate` is."""
        return self._workers.finish(calls, self._setup.config.generate_timeout_seconds)

    @property
    def holds_completions(self) -> bool:
        """Not: it answers requests one by one."""
        return False

    def _ask_all(self, method: str, **kwargs: Any) -> list[Any]:
        """What each engine answers."""
        return self._workers.run_all_workers_sharded_data(
            method,
            replicate_on_axes=self._sharding.names,
            output_is_replicated=WITHIN_AN_ENGINE,
            common_kwargs=kwargs,
            timeout_seconds=self._setup.config.generate_timeout_seconds,
        )

    def update_weights(self, policy: Policy, *, weight_version: int | None = None) -> None:
        """Takes over the policy's weights in the middle of what is being generated.

        If a worker is lost, all are started again first; what they were asked is forgotten.

        Args:
            policy: Whose weights.
            weight_version: What tokens drawn from now on are marked with; None leaves that as it
                is.

        Raises:
            ConsistencyError: If other weights arrived than were sent, the engine computes
                otherwise than the policy, or has changed since the last transfer.
            WorkerError: If the trainer is lost, or the engine once more.
        """
        if weight_version is not None:
            self._weight_version = weight_version
        super().update_weights(policy)

    def _transfer_options(self) -> dict[str, Any]:
        return {"weight_version": self._weight_version, "proof": self._proof_prompts}

    def _prove_update(self, policy: Policy) -> None:
        """Of what the engine computed between two steps of its own, before anything else ran."""
        proofs: list[WeightsProof] = self._ask_all("last_proof")
        for proof in proofs:
            if proof.first is not None:
                check_unchanged(self._proof_prompts, proof.first, proof.last, self._bounds)
        outputs = BatchedDataDict.from_batches([proof.output for proof in proofs])
        self.agreement = self._checked(outputs, policy)

    def restart(self, lost: WorkerLostError) -> None:
        """Starts all workers again with the weights that they had; they were asked nothing then.

        Raises:
            ConsistencyError: If the policy has trained on since it was given them.
        """
        _LOG.warning("%s; the engine is started again", lost.problem)
        self._restart(lost)
