"""A vLLM engine that generates continuously between calls and updates its weights in flight.

One thread owns the engine and steps it while requests are pending. Calls are executed between two
steps. New weights interrupt generation: sampled tokens are kept, their keys and values are dropped,
and each completion continues from its last token with the new weights (Piché et al. 2025,
PipelineRL, arXiv:2509.19128, which keeps the old keys and values). Every token therefore comes from
one known version of the weights. The first rank of an engine broadcasts before each step which
calls to execute, so that all ranks schedule the same requests.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from nemo_rl_core.backends.decoding.requests import Completed, DecodingRequest, read_requests
from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.backends.generation.vllm import SENT, VllmBackend, completed
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.types import Completion

T = TypeVar("T")


@dataclass
class _PendingRequest:
    """A request with the tokens generated so far.

    Attributes:
        priority: Priority of the request; smaller values come first, equal ones in arrival order.
        first_version: Earliest version of the weights that may sample its first token.
        part: Number of interruptions.
    """

    request_id: int
    request: DecodingRequest
    priority: int = 0
    first_version: int = 0
    part: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    @property
    def vllm_request_id(self) -> str:
        return f"{self.request_id}.{self.part}"

    def remaining_request(self) -> DecodingRequest:
        """Returns the rest as a request with a new seed, since the old one's samples are used."""
        if not self.part:
            return self.request
        key = f"{self.request.seed}/{self.part}".encode()
        return replace(
            self.request,
            prompt=self.request.prompt + self.token_ids,
            seed=int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1,
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
        )

    def interrupt(self) -> None:
        """Counts an interruption; drops all tokens if vLLM would miss stop strings across it."""
        self.part += 1
        if self.request.stop_strings:
            self.token_ids, self.logprobs, self.weight_versions = [], [], []

    def take(self, new: Completed, weight_version: int) -> None:
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.weight_versions += [weight_version] * len(new.token_ids)

    def completion(self, *, truncated: bool) -> Completion:
        return Completion(
            tuple(self.token_ids),
            tuple(self.logprobs),
            truncated,
            weight_versions=tuple(self.weight_versions),
        )


@dataclass(frozen=True)
class FinishedRequest:
    """A request with its completion."""

    request_id: int
    prompt: list[int]
    completion: Completion


class StreamingVllmBackend(VllmBackend):
    """A vLLM engine with `submit` for requests and `poll` for completions."""

    scheduling_policy = "priority"

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine in its thread."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[FinishedRequest] = queue.SimpleQueue()
        self._kept: dict[int, FinishedRequest] = {}
        self._running: dict[str, _PendingRequest] = {}
        self._awaiting: list[_PendingRequest] = []
        self._arrivals = count()
        self._failure: Exception | None = None
        self._weight_version = self._next_version = 0
        self._proof_prompts: BatchedDataDict | None = None
        self._is_split = setup.config.ranks_per_engine > 1
        self._first_logprobs: torch.Tensor | None = None
        self._thread = threading.Thread(target=self._serve, name="vllm", daemon=True)
        self._thread.start()
        self._between_steps(lambda: super(StreamingVllmBackend, self).setup(setup))

    def submit(
        self, request_ids: list[int], batch: BatchedDataDict, first_version: int = 0
    ) -> None:
        """Submits requests and returns immediately.

        Args:
            batch: Prompts, with the columns of `generate`. With `priorities [B]`, requests with
                smaller values come first if not all can be computed at once.
            first_version: Earliest version of the weights that may sample the requests. If the
                weights are older, the requests start with the transfer that brings this version.
        """
        requests = read_requests(batch, self._config, max_model_len=self._setup.max_model_len)
        priorities = batch.get("priorities", torch.zeros(len(requests), dtype=torch.long)).tolist()
        pending = [
            _PendingRequest(*each, first_version)
            for each in zip(request_ids, requests, priorities, strict=True)
        ]
        self._between_steps(lambda: self._start_or_wait(pending))

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """Waits up to `wait_seconds` for a completion; returns all finished ones by request id."""
        return [(each.request_id, each.completion) for each in self._new_finished(wait_seconds)]

    def poll_lengths(self, *, wait_seconds: float) -> list[tuple[int, int, bool]]:
        """Waits like `poll`, but keeps the completions here until `take_completions`.

        Returns request id, number of tokens and truncation of each.
        """
        finished = self._new_finished(wait_seconds)
        self._kept |= {each.request_id: each for each in finished}
        return [
            (each.request_id, len(each.completion.token_ids), each.completion.truncated)
            for each in finished
        ]

    def take_completions(self, request_ids: Sequence[int]) -> list[FinishedRequest]:
        """Returns and forgets completions that `poll_lengths` has reported."""
        return [self._kept.pop(request_id) for request_id in request_ids]

    def _new_finished(self, wait_seconds: float) -> list[FinishedRequest]:
        finished = []
        with suppress(queue.Empty):
            finished.append(self._finished.get(timeout=wait_seconds))
            while True:
                finished.append(self._finished.get_nowait())
        if self._failure is not None and not finished:
            # Raised once: its requests are dropped, and later requests are not affected.
            failure, self._failure = self._failure, None
            raise failure
        return finished

    def cancel(self, request_ids: list[int]) -> None:
        """Cancels requests; finished and unknown ones are ignored."""

        def cancel_all() -> None:
            unwanted = set(request_ids)
            self._abort([each for each in self._running.values() if each.request_id in unwanted])
            self._awaiting = [each for each in self._awaiting if each.request_id not in unwanted]

        self._between_steps(cancel_all)
        for request_id in request_ids:
            self._kept.pop(request_id, None)

    def finish_first(self, priority: int) -> None:
        """Completes requests up to this priority, unless interrupting them is cheaper.

        Interruption drops keys and values. It is cheaper if fewer tokens would be computed a second
        time than are left to sample.
        """
        self._between_steps(lambda: self._finish_first(priority))

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Generates like `VllmBackend`, while other requests wait."""

        def generate_exclusively() -> BatchedDataDict:
            waiting = self._interrupt()
            output = super(StreamingVllmBackend, self).generate(batch, greedy=greedy)
            self._start(waiting)
            return output

        return self._between_steps(generate_exclusively)

    def receive_weights(
        self,
        link: LinkSpec,
        index: int,
        weight_version: int = 0,
        proof: BatchedDataDict | None = None,
    ) -> str:
        """Receives one transfer; `proof` has the prompts for `last_proof`."""
        self._next_version, self._proof_prompts = weight_version, proof
        return super().receive_weights(link, index)

    def last_proof(self) -> WeightsProof:
        """Returns the proof of the last transfer, computed without other requests in the engine."""
        return self._last_proof

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights between two steps; unfinished completions continue.

        On a GPU, which has no memory for a second copy, the engine pauses at the first tensor and
        loads the tensors as they arrive. Elsewhere it generates until all have arrived.
        """
        has_room = not torch.cuda.is_available()
        arrived = list(islice(named_tensors, None if has_room else 1))
        weights = chain(arrived, named_tensors)

        def swap() -> None:
            waiting = self._interrupt()
            if self._proof_prompts is None:
                self._reload(weights, source=SENT)
            else:
                self._reload_with_proof(weights, self._proof_prompts)
            self._weight_version = self._next_version
            self._start(waiting)
            awaiting, self._awaiting = self._awaiting, []
            self._start_or_wait(awaiting)

        self._between_steps(swap)

    def _reload_with_proof(
        self, weights: Iterator[tuple[str, torch.Tensor]], prompts: BatchedDataDict
    ) -> None:
        first, last = self._first_logprobs, super().prefill_logprobs(prompts)
        self._reload(weights, source=SENT)
        self._last_proof = WeightsProof(first, last, super().generate(prompts, greedy=False))
        self._first_logprobs = super().prefill_logprobs(prompts)

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights with those of a folder and cancels leftover requests."""

        def reload() -> None:
            self._failure, self._awaiting = None, []
            self._interrupt()
            super(StreamingVllmBackend, self).load_weights(model_folder)
            self._weight_version, self._first_logprobs = 0, None

        self._between_steps(reload)
        self._finished, self._kept = queue.SimpleQueue(), {}

    def wake(self) -> None:
        """Restores the memory of the engine between two steps."""
        self._between_steps(super().wake)

    def sleep(self, *, level: Literal[1, 2] = 1) -> None:
        """Releases the memory of the engine, which has no requests."""
        self._between_steps(lambda: super(StreamingVllmBackend, self).sleep(level=level))

    def shutdown(self) -> None:
        """Stops the engine and its thread."""
        self._commands.put(None)
        self._thread.join()
        super().shutdown()

    def _between_steps(self, command: Callable[[], T]) -> T:
        """Runs a command in the engine's thread and returns or raises its result."""
        if threading.current_thread() is self._thread:
            return command()
        done: Future[T] = Future()

        def carry_out() -> None:
            try:
                done.set_result(command())
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                done.set_exception(error)

        self._commands.put(carry_out)
        return done.result()

    def _serve(self) -> None:
        while True:
            for _ in range(self._num_due()):
                command = self._commands.get()
                if command is None:
                    return
                command()
            if self._running:
                self._step()

    def _num_due(self) -> int:
        """Returns the number of commands before the next step, the same on all ranks.

        Calls reach the ranks in one order but at different times. Without pending requests (all
        ranks have some, or none has), a rank waits for its next command.
        """
        if not self._running:
            return 1
        num_here = self._commands.qsize()
        if not self._is_split:
            return num_here
        from vllm.distributed import get_world_group

        agreed = torch.tensor([num_here])
        torch.distributed.broadcast(agreed, src=0, group=get_world_group().cpu_group)
        return int(agreed)

    def _step(self) -> None:
        try:
            self._take_finished()
        # Broad on purpose: an exception in a thread would be lost; `poll` raises it.
        except Exception as error:  # noqa: BLE001 (raised by poll)
            self._failure = error
            self._abort(list(self._running.values()))

    def _take_finished(self) -> None:
        for output in self._llm.llm_engine.step():
            pending = self._running.pop(output.request_id, None)
            if pending is None:
                continue  # cancelled in the meantime
            new = completed(output.outputs[0])
            pending.take(new, self._weight_version)
            # `poll` is only called on the engine's first rank.
            if not self._is_split or torch.distributed.get_rank() == 0:
                done = pending.completion(truncated=new.truncated)
                self._finished.put(
                    FinishedRequest(pending.request_id, pending.request.prompt, done)
                )

    def _start_or_wait(self, pending: list[_PendingRequest]) -> None:
        """Starts requests that accept the current weights; `take_weights` starts the rest."""
        version = self._weight_version
        self._awaiting += [each for each in pending if each.first_version > version]
        self._start([each for each in pending if each.first_version <= version])

    def _start(self, pending: list[_PendingRequest]) -> None:
        from vllm.sampling_params import RequestOutputKind

        for request in pending:
            remaining = request.remaining_request()
            is_greedy = self._config.temperature == 0
            sampling = self._sampling(remaining, n=1, is_greedy=is_greedy)
            # One output per token would cost a tenth of the engine's time. `_take_unfinished` reads
            # the tokens of interrupted requests.
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            prompt: Any = {"prompt_token_ids": remaining.prompt}
            # Requests of one priority are ordered by a count that is equal on all ranks; vLLM would
            # use each rank's clock.
            arrival = float(next(self._arrivals))
            self._llm.llm_engine.add_request(
                request.vllm_request_id,
                prompt,
                sampling,
                arrival_time=arrival,
                priority=request.priority,
            )
            self._running[request.vllm_request_id] = request

    def _interrupt(self) -> list[_PendingRequest]:
        interrupted = list(self._running.values())
        for request in interrupted:
            self._take_unfinished(request)
        self._abort(interrupted)
        for request in interrupted:
            request.interrupt()
        return interrupted

    def _finish_first(self, priority: int) -> None:
        first = [each for each in self._running.values() if each.priority <= priority]
        if self._interruption_is_cheaper(first):
            return
        while any(each.vllm_request_id in self._running for each in first):
            self._step()

    def _interruption_is_cheaper(self, requests: list[_PendingRequest]) -> bool:
        num_remaining = num_repeated = 0
        for pending in requests:
            drawn = len(self._state(pending).detokenizer.output_token_ids)
            length = len(pending.token_ids) + drawn
            num_remaining += pending.request.max_new_tokens - length
            num_repeated += len(pending.request.prompt) + length if drawn else 0
        return num_remaining > num_repeated

    def _state(self, pending: _PendingRequest) -> Any:
        outputs = self._llm.llm_engine.output_processor
        (internal_id,) = outputs.external_req_ids[pending.vllm_request_id]
        return outputs.request_states[internal_id]

    def _take_unfinished(self, pending: _PendingRequest) -> None:
        state = self._state(pending)
        flat, tokens = state.logprobs_processor.logprobs, list(state.detokenizer.output_token_ids)
        assert flat.token_ids == tokens, "vLLM has logprobs of tokens that it did not sample"
        new = Completed(tokens, flat.logprobs, truncated=False)
        pending.take(new, self._weight_version)

    def _abort(self, unwanted: list[_PendingRequest]) -> None:
        self._llm.llm_engine.abort_request([request.vllm_request_id for request in unwanted])
        for request in unwanted:
            del self._running[request.vllm_request_id]
