"""Engines that go on generating between calls."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.config.generation import SamplingConfig, VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import HeldRow, HeldRows
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation import where_made
from nemo_rl_core.models.generation.balance import RequestBalance
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.layout import WITHIN_AN_ENGINE
from nemo_rl_core.models.generation.options import VllmConfig, read_vllm_setup
from nemo_rl_core.models.generation.where_made import HeldCompletions
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_unchanged
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.types import Completion

_LOG = logging.getLogger(__name__)
_SHARED_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class KeptCompletion:
    """A completion that stays with the engine that has made it until it is handed over.

    Attributes:
        engine: Index of the engine.
        input_length: Tokens of prompt and completion.
        completion_length: Tokens of the completion.
        truncated: A bound ended it.
    """

    engine: int
    input_length: int
    completion_length: int
    truncated: bool


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
        keeps_completions: Whether `poll` brings lengths alone, and `hand_over` references to all
            else; as one user asks for it, before the first request.
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
        self._weight_version, self.keeps_completions = 0, False
        self._unchecked: tuple[BatchedDataDict, Policy] | None = None
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
        self._arrived: list[tuple[int, Completion | KeptCompletion]] = []
        self._submitting: list[Any] = []

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """It is always ready."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """It goes on with what it was asked; there is no memory that it could give away."""

    def submit(
        self, names: Sequence[int], requests: BatchedDataDict, *, first_version: int = 0
    ) -> None:
        """Hands requests over and returns at once; what becomes of that, the next call raises.

        An engine takes them between two of its own steps, for which nobody waits.

        Args:
            names: `B` of them, by which `poll` calls the completions.
            requests: As for `generate`, drawn under the temperature, or as
                `where_made.whole_requests` takes them.
            first_version: An engine begins them when its weights have this version or a later one;
                with a transfer, before it answers that.

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
            prompt_tokens=where_made.lengths_before(requests).tolist(),
            new_tokens=limits.clamp(max=most).tolist(),
        )
        for engine, rows in enumerate(shares):
            if rows:
                batch = requests.select_indices(rows)
                own = [names[row] for row in rows]
                self._submitting += self._calls(
                    engine,
                    "__ray_call__",
                    where_made.submit,
                    names=own,
                    batch=batch,
                    first_version=first_version,
                )

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion | KeptCompletion]]:
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
        busy, method = self._balance.busy, "poll_lengths" if self.keeps_completions else "poll"
        calls = [
            self._workers.start_single_worker(
                method, rank=engine * self._ranks, wait_seconds=wait_seconds
            )
            for engine in busy
        ]
        lengths: list[int] = []
        num_generated = 0
        for engine, answer in zip(busy, self._finish(calls), strict=True):
            for name, *made in answer:
                request = self._balance.settle(name)
                if request is None and self.keeps_completions:
                    continue  # given up in the same moment
                prompt_tokens = request.prompt_tokens if request else 0
                drawn = made[0] if self.keeps_completions else len(made[0].token_ids)
                lengths.append(prompt_tokens + drawn)
                num_generated += drawn
                found = KeptCompletion(engine, lengths[-1], *made) if len(made) > 1 else made[0]
                self._arrived.append((name, found))
        if lengths:
            shape = model_shape(self._setup.model_folder)
            usage.count("generation", shape, lengths, num_generated=num_generated)

    def hand_over(
        self,
        kept: Mapping[int, KeptCompletion],
        before: Mapping[int, HeldRow] | None = None,
    ) -> HeldCompletions:
        """Has the engines put completions into the object store, a block each.

        Args:
            kept: What `poll` has returned, by name; each is handed over once.
            before: The rows behind which some of them went on, as their requests had them.

        Raises:
            WorkerLostError: If a worker is lost, and with it what it keeps; see `restart`.
        """
        engine = np.array([each.engine for each in kept.values()], np.int64)
        names, calls = np.array(list(kept), np.int64), []
        used, block = np.unique(engine, return_inverse=True)
        row = np.zeros(len(names), np.int64)
        for number, each in enumerate(used.tolist()):
            own = np.flatnonzero(block == number)
            row[own] = np.arange(len(own))
            asked = [(before or {}).get(name) for name in names[own].tolist()]
            going_on = [place for place, each in enumerate(asked) if each is not None]
            rows = [each for each in asked if each is not None]
            calls.append(
                self._workers.start_single_worker(
                    "__ray_call__",
                    where_made.hand_over,
                    rank=each * self._ranks,
                    num_held=2,
                    names=names[own].tolist(),
                    model_folder=self._setup.model_folder,
                    going_on=going_on,
                    before=HeldRows.of_each(rows) if rows else None,
                )
            )
        self._finish([first for first, _, _ in calls])
        return HeldCompletions(
            np.array([each.input_length for each in kept.values()], np.int64),
            np.array([each.completion_length for each in kept.values()], np.int64),
            np.array([each.truncated for each in kept.values()], np.bool_),
            HeldRows(tuple(tokens for _, tokens, _ in calls), block, row),
            HeldRows(tuple(texts for _, _, texts in calls), block, row),
        )

    def finish_first(self, priority: int) -> None:
        """Waits for requests of this priority and smaller ones that are nearly complete.

        New weights interrupt what is under way, and its keys and values are computed anew. Each
        engine completes these requests before that, unless more tokens are left to draw, at most,
        than would be computed anew. The next transfer replaces an engine that is lost meanwhile.
        """
        with suppress(WorkerLostError):
            self._ask_all("finish_first", priority=priority)

    def cancel(self, names: Sequence[int]) -> None:
        """Gives requests up; their completions may still come from the next `poll`."""
        self._ask_all("cancel", names=list(names))
        for name in names:
            self._balance.settle(name)

    @property
    def _ranks(self) -> int:
        return self._setup.config.ranks_per_engine

    def _calls(self, engine: int, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls of all ranks of an engine."""
        first = engine * self._ranks
        return [
            self._workers.start_single_worker(method, *args, rank=rank, **kwargs)
            for rank in range(first, first + self._ranks)
        ]

    def _finish(self, calls: Sequence[Any]) -> list[Any]:
        """Their answers; a worker that is stuck is lost, as one that does not `generate` is."""
        before, self._submitting = self._submitting, []
        limit = self._setup.config.generate_timeout_seconds
        return self._workers.finish([*before, *calls], limit)[len(before) :]

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

    def update_weights(
        self, policy: Policy, *, weight_version: int | None = None, checks_later: bool = False
    ) -> None:
        """Takes over the policy's weights in the middle of what is being generated.

        If a worker is lost, all are started again first; what they were asked is forgotten.

        Args:
            policy: Whose weights.
            weight_version: What tokens drawn from now on are marked with; None leaves that as it
                is.
            checks_later: Leave the policy's part of the proof to `check_update`, so that the engine
                can be given requests before.

        Raises:
            ConsistencyError: If other weights arrived than were sent, the engine computes
                otherwise than the policy, or has changed since the last transfer.
            WorkerError: If the trainer is lost, or the engine once more.
        """
        if weight_version is not None:
            self._weight_version = weight_version
        super().update_weights(policy)
        if not checks_later:
            self.check_update()

    def check_update(self) -> None:
        """Compares what an update has proved with its policy, which must not have trained on.

        Raises:
            ConsistencyError: If the engine computes otherwise than the policy.
        """
        if self._unchecked is None:
            return
        (outputs, policy), self._unchecked = self._unchecked, None
        try:
            self.agreement = self._checked(outputs, policy)
        except BaseException:
            self._session.discard(self._name)
            raise

    def _transfer_options(self) -> dict[str, Any]:
        return {"weight_version": self._weight_version, "proof": self._proof_prompts}

    def _prove_update(self, policy: Policy) -> None:
        """Of what the engine computed between two steps of its own, before anything else ran."""
        proofs: list[WeightsProof] = self._ask_all("last_proof")
        for proof in proofs:
            if proof.first is not None:
                check_unchanged(self._proof_prompts, proof.first, proof.last, self._bounds)
        outputs = BatchedDataDict.from_batches([proof.output for proof in proofs])
        self._unchecked = outputs, policy

    def restart(self, lost: WorkerLostError) -> None:
        """Starts all workers again with the weights that they had; they were asked nothing then.

        Raises:
            ConsistencyError: If the policy has trained on since it was given them.
        """
        _LOG.warning("%s; the engine is started again", lost.problem)
        self._restart(lost)
