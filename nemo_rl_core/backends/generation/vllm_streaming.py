"""A vLLM engine that goes on generating between calls, and takes new weights in the middle of it.

The engine belongs to one thread, which steps it while there is something to do. Between two steps
it carries out what callers ask for, so that no call ever meets a half-done step. New weights
interrupt what is being generated: tokens drawn so far stay, their keys and values do not, and each
completion goes on from its last token under the new weights (Piché et al. 2025, PipelineRL,
arXiv:2509.19128, there with the old keys and values). So every token is known to come from one
version of the weights.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
class _UnderWay:
    """A completion as far as it is.

    Attributes:
        name: The caller's.
        request: What was asked for.
        part: How often it was interrupted.
    """

    name: int
    request: DecodingRequest
    part: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    @property
    def engine_name(self) -> str:
        return f"{self.name}.{self.part}"

    def what_is_left(self) -> DecodingRequest:
        """The rest as a request of its own, with another seed: the first one's draws are used."""
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
        """A text that ends it is not found across an interruption, so then it begins anew."""
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


class StreamingVllmBackend(VllmBackend):
    """One vLLM engine that callers hand requests to and fetch completions from."""

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine, and the thread that it lives in."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
        self._running: dict[str, _UnderWay] = {}
        self._failure: Exception | None = None
        self._weight_version = self._next_version = 0
        self._proof_prompts: BatchedDataDict | None = None
        self._first_logprobs: torch.Tensor | None = None
        self._thread = threading.Thread(target=self._serve, name="vllm", daemon=True)
        self._thread.start()
        self._between_steps(lambda: super(StreamingVllmBackend, self).setup(setup))

    def submit(self, names: list[int], batch: BatchedDataDict) -> None:
        """Takes requests over and returns at once.

        Args:
            names: `B` of them, by which `poll` calls the completions.
            batch: As for `generate`; the draws are under the temperature.
        """
        requests = read_requests(batch, self._config, max_model_len=self._setup.max_model_len)
        asked = [_UnderWay(*each) for each in zip(names, requests, strict=True)]
        self._between_steps(lambda: self._start(asked))

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """The completions that are done and were not returned before, by name.

        Args:
            wait_seconds: For the first of them.

        Raises:
            Exception: What the engine raised.
        """
        found = []
        with suppress(queue.Empty):
            found.append(self._finished.get(timeout=wait_seconds))
            while True:
                found.append(self._finished.get_nowait())
        if self._failure is not None and not found:
            # Once: what was asked is forgotten with it, and whoever asks next is none the worse.
            failure, self._failure = self._failure, None
            raise failure
        return found

    def cancel(self, names: list[int]) -> None:
        """Gives requests up; those that are done or unknown are none of its business."""

        def give_up() -> None:
            unwanted = set(names)
            self._abort([each for each in self._running.values() if each.name in unwanted])

        self._between_steps(give_up)

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """As the engine without a stream; other requests wait meanwhile."""

        def alone() -> BatchedDataDict:
            waiting = self._interrupt()
            output = super(StreamingVllmBackend, self).generate(batch, greedy=greedy)
            self._start(waiting)
            return output

        return self._between_steps(alone)

    def receive_weights(
        self,
        link: LinkSpec,
        index: int,
        weight_version: int = 0,
        proof: BatchedDataDict | None = None,
    ) -> str:
        """Takes one transfer, as `ReceivesWeights` has it.

        Args:
            link: Opened where it is new.
            index: Among the receivers.
            weight_version: What tokens drawn with these weights are marked with.
            proof: Prompts for `last_proof`, as `generate` takes them.

        Returns:
            The digest of what arrived.
        """
        self._next_version, self._proof_prompts = weight_version, proof
        return super().receive_weights(link, index)

    def last_proof(self) -> WeightsProof:
        """What the prompts of the last transfer gave, when nothing else was in the engine."""
        return self._last_proof

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights between two steps; completions under way go on with the new ones."""
        arrived = list(named_tensors)  # while the engine goes on

        def swap() -> None:
            waiting = self._interrupt()
            if self._proof_prompts is None:
                self._reload(arrived, source=SENT)
            else:
                self._reload_with_proof(arrived, self._proof_prompts)
            self._weight_version = self._next_version
            self._start(waiting)

        self._between_steps(swap)

    def _reload_with_proof(
        self, arrived: list[tuple[str, torch.Tensor]], prompts: BatchedDataDict
    ) -> None:
        first, last = self._first_logprobs, super().prefill_logprobs(prompts)
        self._reload(arrived, source=SENT)
        self._last_proof = WeightsProof(first, last, super().generate(prompts, greedy=False))
        self._first_logprobs = super().prefill_logprobs(prompts)

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of a folder, and gives up what an earlier caller left."""

        def begin_anew() -> None:
            self._failure = None
            self._interrupt()
            super(StreamingVllmBackend, self).load_weights(model_folder)
            self._weight_version, self._first_logprobs = 0, None

        self._between_steps(begin_anew)
        self._finished = queue.SimpleQueue()

    def shutdown(self) -> None:
        """Ends the engine with its thread."""
        self._commands.put(None)
        self._thread.join()
        super().shutdown()

    def _between_steps(self, command: Callable[[], T]) -> T:
        """What the command returns or raises, carried out by the engine's thread."""
        done: Future[T] = Future()

        def carry_out() -> None:
            try:
                done.set_result(command())
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                done.set_exception(error)

        self._commands.put(carry_out)
        return done.result()

    def _serve(self) -> None:
        """The thread: commands first, then a step of the engine, for ever."""
        while True:
            while not self._running or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
            try:
                self._step()
            # Named fault boundary: nobody would hear of an exception in a thread; `poll` raises it.
            except Exception as error:  # noqa: BLE001 (raised by poll)
                self._failure = error
                self._abort(list(self._running.values()))

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            under_way = self._running.get(output.request_id)
            if under_way is None:
                continue  # given up in the meantime
            new = completed(output.outputs[0])
            under_way.take(new, self._weight_version)
            if output.finished:
                del self._running[output.request_id]
                done = under_way.completion(truncated=new.truncated)
                self._finished.put((under_way.name, done))

    def _start(self, asked: list[_UnderWay]) -> None:
        from vllm.sampling_params import RequestOutputKind

        for each in asked:
            left = each.what_is_left()
            sampling = self._sampling(left, greedy=False)
            sampling.output_kind = RequestOutputKind.DELTA
            prompt: Any = {"prompt_token_ids": left.prompt}
            self._llm.llm_engine.add_request(each.engine_name, prompt, sampling)
            self._running[each.engine_name] = each

    def _interrupt(self) -> list[_UnderWay]:
        """Takes everything out of the engine, ready to be started again."""
        interrupted = list(self._running.values())
        self._abort(interrupted)
        for each in interrupted:
            each.interrupt()
        return interrupted

    def _abort(self, unwanted: list[_UnderWay]) -> None:
        self._llm.llm_engine.abort_request([each.engine_name for each in unwanted])
        for each in unwanted:
            del self._running[each.engine_name]
