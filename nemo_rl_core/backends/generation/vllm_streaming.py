"""A vLLM engine that generates continuously between calls and takes new weights in flight.

The engine belongs to one thread, which steps it while requests are pending. Calls are executed
between two steps, so that no call sees an unfinished step. New weights interrupt generation:
sampled tokens stay, their keys and values are dropped, and each completion continues from its last
token under the new weights (Piché et al. 2025, PipelineRL, arXiv:2509.19128, which keeps the old
keys and values). Every token therefore comes from one known version of the weights.

The ranks of an engine each run this over the same requests. While requests are pending, the first
rank tells the others before each step which calls to execute, so that all schedule the same.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_rl_core.backends.decoding.requests import Completed, DecodingRequest, read_requests
from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.backends.generation.vllm import SENT, VllmBackend, completed
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync import LinkSpec
from nemo_rl_core.types import Completion

T = TypeVar("T")


@dataclass
class _PendingRequest:
    """A request with the tokens generated so far.

    Attributes:
        name: The caller's name for it.
        request: The original request.
        priority: Requests with a smaller one come first, those with an equal one in their order.
        first_version: Of the weights that draw its first token, or an earlier one.
        part: Number of interruptions.
    """

    name: int
    request: DecodingRequest
    priority: int = 0
    first_version: int = 0
    part: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    @property
    def engine_name(self) -> str:
        return f"{self.name}.{self.part}"

    def remaining_request(self) -> DecodingRequest:
        """The rest as a request with another seed, since the first one's samples are used."""
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
        """Starts over if there are stop strings, which vLLM cannot match across interruptions."""
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
    """A request with its completion.

    Attributes:
        name: The caller's name for it.
        prompt: Token ids.
        completion: What followed.
    """

    name: int
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

    def submit(self, names: list[int], batch: BatchedDataDict, first_version: int = 0) -> None:
        """Submits requests and returns at once.

        Args:
            names: `B` names, under which `poll` returns the completions.
            batch: As for `generate`; sampled with the temperature. With `priorities [B]`, requests
                of smaller ones come first where not all can be computed at once.
            first_version: The requests begin when the weights have this version or a later one, and
                with a transfer without another call in between.
        """
        requests = read_requests(batch, self._config, max_model_len=self._setup.max_model_len)
        priorities = batch.get("priorities", torch.zeros(len(requests), dtype=torch.long)).tolist()
        pending = [
            _PendingRequest(*each, first_version)
            for each in zip(names, requests, priorities, strict=True)
        ]
        self._between_steps(lambda: self._start_or_wait(pending))

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """Returns new finished completions, with their names.

        Args:
            wait_seconds: Time to wait for the first of them.

        Raises:
            Exception: The engine's exception.
        """
        return [(each.name, each.completion) for each in self._new_finished(wait_seconds)]

    def poll_lengths(self, *, wait_seconds: float) -> list[tuple[int, int, bool]]:
        """As `poll`, of completions that stay here until they are handed over.

        Returns:
            The name, the number of new tokens, and whether a bound ended them, of each.
        """
        found = self._new_finished(wait_seconds)
        self._kept |= {each.name: each for each in found}
        return [
            (each.name, len(each.completion.token_ids), each.completion.truncated) for each in found
        ]

    def hand_over(self, names: Sequence[int]) -> list[FinishedRequest]:
        """Completions that `poll_lengths` has named, once."""
        return [self._kept.pop(name) for name in names]

    def _new_finished(self, wait_seconds: float) -> list[FinishedRequest]:
        found = []
        with suppress(queue.Empty):
            found.append(self._finished.get(timeout=wait_seconds))
            while True:
                found.append(self._finished.get_nowait())
        if self._failure is not None and not found:
            # Raised once: its requests are dropped with it, and later requests are not affected.
            failure, self._failure = self._failure, None
            raise failure
        return found

    def cancel(self, names: list[int]) -> None:
        """Cancels requests; finished and unknown ones are ignored."""

        def cancel_all() -> None:
            unwanted = set(names)
            self._abort([each for each in self._running.values() if each.name in unwanted])
            self._awaiting = [each for each in self._awaiting if each.name not in unwanted]

        self._between_steps(cancel_all)
        for name in names:
            self._kept.pop(name, None)

    def finish_first(self, priority: int) -> None:
        """Completes requests of this priority and smaller ones, unless interruption is cheaper.

        That is where more tokens are left to draw, at most, than would be computed a second time,
        since the keys and values of what is interrupted are dropped.
        """
        self._between_steps(lambda: self._finish_first(priority))

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Generates as `VllmBackend` does, while other requests wait."""

        def generate_alone() -> BatchedDataDict:
            waiting = self._interrupt()
            output = super(StreamingVllmBackend, self).generate(batch, greedy=greedy)
            self._start(waiting)
            return output

        return self._between_steps(generate_alone)

    def receive_weights(
        self,
        link: LinkSpec,
        index: int,
        weight_version: int = 0,
        proof: BatchedDataDict | None = None,
    ) -> str:
        """Receives one transfer, as in `ReceivesWeights`.

        Args:
            link: Opened on first use.
            index: Index among the receivers.
            weight_version: Weight version recorded for tokens sampled with these weights.
            proof: Prompts for `last_proof`, as for `generate`.

        Returns:
            The digest of the received weights.
        """
        self._next_version, self._proof_prompts = weight_version, proof
        return super().receive_weights(link, index)

    def last_proof(self) -> WeightsProof:
        """The proof of the last transfer, computed without other requests in the engine."""
        return self._last_proof

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights between two steps; unfinished completions continue.

        On a GPU the engine pauses with the first tensor and loads them as they arrive: there is no
        memory for a second copy. Elsewhere it generates until all of them are there.
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
        """Replaces all weights by those of a folder, and cancels leftover requests."""

        def reload() -> None:
            self._failure, self._awaiting = None, []
            self._interrupt()
            super(StreamingVllmBackend, self).load_weights(model_folder)
            self._weight_version, self._first_logprobs = 0, None

        self._between_steps(reload)
        self._finished, self._kept = queue.SimpleQueue(), {}

    def shutdown(self) -> None:
        """Stops the engine and its thread."""
        self._commands.put(None)
        self._thread.join()
        super().shutdown()

    def _between_steps(self, command: Callable[[], T]) -> T:
        """Runs a command in the engine's thread and returns or raises its result."""
        done: Future[T] = Future()

        def carry_out() -> None:
            try:
                done.set_result(command())
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                done.set_exception(error)

        self._commands.put(carry_out)
        return done.result()

    def _serve(self) -> None:
        """Loop of the thread: commands first, then a step of the engine."""
        while True:
            for _ in range(self._num_due()):
                command = self._commands.get()
                if command is None:
                    return
                command()
            if self._running:
                self._step()

    def _num_due(self) -> int:
        """How many commands to execute before the next step, on all ranks the same.

        Calls reach the ranks in one order but at different times. Without pending requests, which
        all ranks have or none, a rank waits for its next command.
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
        # Named fault boundary: an exception in a thread would be lost; `poll` raises it.
        except Exception as error:  # noqa: BLE001 (raised by poll)
            self._failure = error
            self._abort(list(self._running.values()))

    def _take_finished(self) -> None:
        for output in self._llm.llm_engine.step():
            under_way = self._running.pop(output.request_id, None)
            if under_way is None:
                continue  # cancelled in the meantime
            new = completed(output.outputs[0])
            under_way.take(new, self._weight_version)
            if self._answers:
                done = under_way.completion(truncated=new.truncated)
                request = under_way.request
                self._finished.put(FinishedRequest(under_way.name, request.prompt, done))

    @cached_property
    def _answers(self) -> bool:
        """Whether `poll` is called here: on the first rank of an engine."""
        return not self._is_split or torch.distributed.get_rank() == 0

    def _start_or_wait(self, pending: list[_PendingRequest]) -> None:
        """Starts what may be drawn from with the weights of now; `take_weights` starts the rest."""
        version = self._weight_version
        self._awaiting += [each for each in pending if each.first_version > version]
        self._start([each for each in pending if each.first_version <= version])

    def _start(self, pending: list[_PendingRequest]) -> None:
        from vllm.sampling_params import RequestOutputKind

        for each in pending:
            left = each.remaining_request()
            is_greedy = self._config.temperature == 0
            sampling = self._sampling(left, n=1, is_greedy=is_greedy)
            # An output a token costs a tenth of the engine's time; `_take_unfinished` has the rest.
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            prompt: Any = {"prompt_token_ids": left.prompt}
            # Requests of one priority are ordered by a count, equal on all ranks, where vLLM takes
            # the time of each rank's clock.
            arrival = float(next(self._arrivals))
            self._llm.llm_engine.add_request(
                each.engine_name, prompt, sampling, arrival_time=arrival, priority=each.priority
            )
            self._running[each.engine_name] = each

    def _interrupt(self) -> list[_PendingRequest]:
        """Takes all requests out of the engine, ready to be started again."""
        interrupted = list(self._running.values())
        for each in interrupted:
            self._take_unfinished(each)
        self._abort(interrupted)
        for each in interrupted:
            each.interrupt()
        return interrupted

    def _finish_first(self, priority: int) -> None:
        first = [each for each in self._running.values() if each.priority <= priority]
        if self._interruption_is_cheaper(first):
            return
        while any(each.engine_name in self._running for each in first):
            self._step()

    def _interruption_is_cheaper(self, requests: list[_PendingRequest]) -> bool:
        """Compares the tokens left to draw with those that would be computed a second time."""
        left = again = 0
        for each in requests:
            drawn = len(self._state(each).detokenizer.output_token_ids)
            length = len(each.token_ids) + drawn
            left += each.request.max_new_tokens - length
            again += len(each.request.prompt) + length if drawn else 0
        return left > again

    def _state(self, under_way: _PendingRequest) -> Any:
        """What vLLM knows of a request."""
        outputs = self._llm.llm_engine.output_processor
        (internal,) = outputs.external_req_ids[under_way.engine_name]
        return outputs.request_states[internal]

    def _take_unfinished(self, under_way: _PendingRequest) -> None:
        """Takes the tokens that vLLM has generated since the request was started."""
        state = self._state(under_way)
        found, tokens = state.logprobs_processor.logprobs, list(state.detokenizer.output_token_ids)
        assert found.token_ids == tokens, "vLLM holds logprobs of other tokens than it sampled"
        new = Completed(tokens, found.logprobs, truncated=False)
        under_way.take(new, self._weight_version)

    def _abort(self, unwanted: list[_PendingRequest]) -> None:
        self._llm.llm_engine.abort_request([each.engine_name for each in unwanted])
        for each in unwanted:
            del self._running[each.engine_name]
