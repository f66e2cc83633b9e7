"""Engines that keep generating between calls."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.config.generation import SamplingConfig, VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, RemoteRow, RemoteRows
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync.link import WeightLink
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation import remote_completions
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.layout import WITHIN_AN_ENGINE
from nemo_rl_core.models.generation.options import VllmConfig, read_vllm_setup
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_unchanged
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.types import Completion

_SHARED_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class KeptCompletion:
    """A completion that stays in its engine until `take_remotely`."""

    engine: int
    input_length: int
    completion_length: int
    truncated: bool


@dataclass(frozen=True)
class OutstandingRequest:
    """A request that an engine has not answered."""

    engine: int
    prompt_tokens: int
    most_tokens: int


class RequestBalance:
    """Sends each request to the engine with the fewest outstanding tokens.

    The length of a completion is not known, so a request counts with the most tokens that it can
    have. Which engine serves a request does not change its tokens, since each request has a seed.

    Example:
        >>> balance = RequestBalance(2)
        >>> balance.assign([0, 1, 2], prompt_tokens=[4, 4, 4], new_tokens=[96, 16, 16])
        [[0], [1, 2]]
        >>> balance.settle(0).prompt_tokens
        4
        >>> balance.assign([3], prompt_tokens=[4], new_tokens=[16])
        [[0], []]
    """

    def __init__(self, num_engines: int) -> None:
        self._tokens = [0] * num_engines
        self._requests: dict[int, OutstandingRequest] = {}

    @property
    def busy(self) -> list[int]:
        """Engines with outstanding requests."""
        return [engine for engine, tokens in enumerate(self._tokens) if tokens]

    def assign(
        self, request_ids: Sequence[int], *, prompt_tokens: Sequence[int], new_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Assigns each request to an engine, in order."""
        shares: list[list[int]] = [[] for _ in self._tokens]
        for index, (request_id, prompt, new) in enumerate(
            zip(request_ids, prompt_tokens, new_tokens, strict=True)
        ):
            engine = min(range(len(self._tokens)), key=self._tokens.__getitem__)
            self._requests[request_id] = OutstandingRequest(engine, prompt, prompt + new)
            self._tokens[engine] += prompt + new
            shares[engine].append(index)
        return shares

    def settle(self, request_id: int) -> OutstandingRequest | None:
        """Removes a request that was answered or cancelled; None if it is not outstanding."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._tokens[request.engine] -= request.most_tokens
        return request


class RequestGeneration(Generation):
    """vLLM engines that take requests while others are under way.

    A request goes to the engine with the fewest outstanding tokens.

    Attributes:
        keeps_completions: Whether `poll` returns only lengths, and `take_remotely` references to
            the rest; set before the first request.
    """

    _has_versions = False
    keeps_completions = False

    @property
    def _backend(self) -> str:
        return "vllm_streaming"

    def _start(self) -> None:
        super()._start()
        self._balance = RequestBalance(self.num_engines)  # new engines have no requests
        self._arrived: list[tuple[int, Completion | KeptCompletion]] = []
        self._submitting: list[Any] = []

    def submit(
        self, request_ids: Sequence[int], requests: BatchedDataDict, *, first_version: int = 0
    ) -> None:
        """Submits requests and returns at once; the next call raises errors of the engines.

        An engine takes requests between two of its steps; this call does not wait for that.

        Args:
            request_ids: `B` ids, which `poll` returns with the completions.
            requests: Same as in `generate`, always sampled with the temperature, or the
                result of `Requests.batch`.
            first_version: First version of the weights that may complete the requests. An engine
                begins them before it answers the transfer of that version.
        """
        self._prove_folder()
        if self.num_engines > 1:
            self._collect(wait_seconds=0.0)  # removes finished requests from the load
        most = self._setup.config.max_new_tokens
        limits = requests.get("max_new_tokens", torch.full((requests.size,), most))
        shares = self._balance.assign(
            request_ids,
            prompt_tokens=remote_completions.lengths_before(requests).tolist(),
            new_tokens=limits.clamp(max=most).tolist(),
        )
        for engine, rows in enumerate(shares):
            if rows:
                batch = requests.select_indices(rows)
                self._submitting += self._calls(
                    engine,
                    "__ray_call__",
                    remote_completions.submit,
                    request_ids=[request_ids[row] for row in rows],
                    batch=batch,
                    first_version=first_version,
                )

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion | KeptCompletion]]:
        """Returns the request ids and completions of requests that finished since the last call."""
        if not self._arrived:
            busy = len(self._balance.busy)
            # All engines are polled together: an idle one must not delay the others.
            self._collect(
                wait_seconds=wait_seconds if busy == 1 else min(wait_seconds, _SHARED_POLL_SECONDS)
            )
        arrived, self._arrived = self._arrived, []
        return arrived

    def _collect(self, *, wait_seconds: float) -> None:
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
            for request_id, *made in answer:
                request = self._balance.settle(request_id)
                if request is None and self.keeps_completions:
                    continue  # cancelled at the same time
                prompt_tokens = request.prompt_tokens if request else 0
                drawn = made[0] if self.keeps_completions else len(made[0].token_ids)
                lengths.append(prompt_tokens + drawn)
                num_generated += drawn
                completion = (
                    KeptCompletion(engine, lengths[-1], *made) if len(made) > 1 else made[0]
                )
                self._arrived.append((request_id, completion))
        if lengths:
            shape = model_shape(self._setup.model_folder)
            usage.count("generation", shape, lengths, num_generated=num_generated)

    def take_remotely(
        self,
        kept: Mapping[int, KeptCompletion],
        before: Mapping[int, RemoteRow] | None = None,
    ) -> RemoteCompletions:
        """Makes each engine put its completions into the object store, as one block.

        Args:
            kept: Completions from `poll`, by request id; each can be taken once.
            before: Remote rows that the requests of some of them followed, by request id.
        """
        engine = np.array([each.engine for each in kept.values()], np.int64)
        request_ids, calls = np.array(list(kept), np.int64), []
        used, block = np.unique(engine, return_inverse=True)
        row = np.zeros(len(request_ids), np.int64)
        for number, each in enumerate(used.tolist()):
            rows_of_engine = np.flatnonzero(block == number)
            row[rows_of_engine] = np.arange(len(rows_of_engine))
            earlier = [
                (before or {}).get(request_id)
                for request_id in request_ids[rows_of_engine].tolist()
            ]
            continued = [index for index, each in enumerate(earlier) if each is not None]
            rows = [each for each in earlier if each is not None]
            calls.append(
                self._workers.start_single_worker(
                    "__ray_call__",
                    remote_completions.take_remotely,
                    rank=each * self._ranks,
                    num_remote=2,
                    request_ids=request_ids[rows_of_engine].tolist(),
                    model_folder=self._setup.model_folder,
                    continued=continued,
                    before=RemoteRows.of_each(rows) if rows else None,
                    has_versions=self._has_versions,
                )
            )
        self._finish([first for first, _, _ in calls])
        return RemoteCompletions(
            np.array([each.input_length for each in kept.values()], np.int64),
            np.array([each.completion_length for each in kept.values()], np.int64),
            np.array([each.truncated for each in kept.values()], np.bool_),
            RemoteRows(tuple(tokens for _, tokens, _ in calls), block, row),
            RemoteRows(tuple(texts for _, _, texts in calls), block, row),
        )

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Cancels requests; the next `poll` may still return their completions."""
        self._ask_all("cancel", request_ids=list(request_ids))
        for request_id in request_ids:
            self._balance.settle(request_id)

    @property
    def _ranks(self) -> int:
        return self._setup.config.ranks_per_engine

    def _calls(self, engine: int, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        first = engine * self._ranks
        return [
            self._workers.start_single_worker(method, *args, rank=rank, **kwargs)
            for rank in range(first, first + self._ranks)
        ]

    def _finish(self, calls: Sequence[Any]) -> list[Any]:
        """Returns the answers; a worker that does not answer in time is lost, as in `generate`."""
        before, self._submitting = self._submitting, []
        limit = self._setup.config.generate_timeout_seconds
        return self._workers.finish([*before, *calls], limit)[len(before) :]

    def _ask_all(self, method: str, **kwargs: Any) -> list[Any]:
        return self._workers.run_all_workers_sharded_data(
            method,
            replicate_on_axes=self._sharding.names,
            output_is_replicated=WITHIN_AN_ENGINE,
            common_kwargs=kwargs,
            timeout_seconds=self._setup.config.generate_timeout_seconds,
        )

    def restart(self, lost: WorkerLostError) -> None:
        """Restarts all workers with the weights that they had, and without requests."""
        self._restart(lost)


class TurnGeneration(RequestGeneration):
    """vLLM engines for the turns of episodes, with new weights only between two batches of them."""


class StreamingGeneration(RequestGeneration):
    """vLLM engines that take requests at any time, and new weights during generation.

    New weights reach all engines in one transfer, as one version.

    All samples of a step may be from older weights than the policy's, so that its gate cannot
    compare them. Therefore every transfer of weights ends with a proof, and begins with a check
    that each engine still computes the same as at the end of the previous transfer.

    Args:
        cluster: A session with its running workers, or a custom cluster.
        config: Model, sampling and size of vLLM engines, the same as in `VllmGeneration`.

    Attributes:
        agreement: Largest `token_mult_prob_error` of an engine in the last proof; 1 is perfect
            agreement.
    """

    _has_versions = True
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
        self._unchecked: tuple[BatchedDataDict, Policy] | None = None
        super().__init__(cluster, setup, name=name, gate=gate)

    @staticmethod
    def _refuse_other_engines(config: SamplingConfig) -> None:
        if not isinstance(config, VllmGenerationConfig):
            raise ConfigError(
                "this engine cannot sample while a model trains",
                expected="generation.backend: vllm",
                got=getattr(config, "backend", type(config).__name__),
                fix="change the section generation, or use Generation",
            )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the engine is always ready."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the engine continues with its requests and frees no memory."""

    def finish_first(self, priority: int) -> None:
        """Waits for nearly complete requests of this priority or a smaller one.

        New weights interrupt requests, whose keys and values must then be computed again. Each
        engine completes these requests before that, unless they may draw more tokens than would be
        computed again. The next transfer replaces an engine that is lost meanwhile.
        """
        with suppress(WorkerLostError):
            self._ask_all("finish_first", priority=priority)

    def _sleep_options(self, *, discards_weights: bool) -> None:
        """Returns None, as the engine never sleeps."""

    def update_weights(
        self, policy: Policy, *, weight_version: int | None = None, checks_later: bool = False
    ) -> None:
        """Loads the policy's weights while requests are under way.

        If a worker is lost, all are restarted first, and their requests are lost.

        Args:
            weight_version: Version that is recorded for tokens from now on; None keeps the last.
            checks_later: Whether to leave the policy's part of the proof to `check_update`, so that
                the engine can be given requests before.

        Raises:
            ConsistencyError: If the received weights differ from those sent, the engine disagrees
                with the policy, or has changed since the last transfer.
            WorkerError: If the trainer is lost, or the engine again.
        """
        if weight_version is not None:
            self._weight_version = weight_version
        super().update_weights(policy)
        if not checks_later:
            self.check_update()

    def check_update(self) -> None:
        """Compares the proof of the last update with its policy, which must be unchanged."""
        if self._unchecked is None:
            return
        (outputs, policy), self._unchecked = self._unchecked, None
        try:
            self.agreement = self._checked(outputs, policy)
        except BaseException:
            self._session.discard(self._name)
            raise

    def _transfer_and_prove(self, link: WeightLink, policy: Policy) -> None:
        """Takes the proof that the engine computes right after the transfer, between two steps."""
        self._digest = link.transfer(weight_version=self._weight_version, proof=self._proof_prompts)
        proofs: list[WeightsProof] = self._ask_all("last_proof")
        for proof in proofs:
            if proof.first is not None:
                check_unchanged(self._proof_prompts, proof.first, proof.last, self._bounds)
        outputs = BatchedDataDict.from_batches([proof.output for proof in proofs])
        self._unchecked = outputs, policy
