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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync import WeightBucket
from nemo_rl_core.types import Completion

T = TypeVar("T")


@dataclass
class _Request:
    """A completion under way.

    Attributes:
        name: The caller's.
        prompt: Token ids.
        seed: Of the draws until the first interruption.
        max_new_tokens: Of the whole completion.
        part: How often it was interrupted.
    """

    name: int
    prompt: list[int]
    seed: int
    max_new_tokens: int
    part: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)

    @property
    def engine_name(self) -> str:
        return f"{self.name}.{self.part}"

    def part_seed(self) -> int:
        """Another one after every interruption: the first one's draws have been used."""
        if not self.part:
            return self.seed
        key = f"{self.seed}/{self.part}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1

    def take(self, token_ids: list[int], logprobs: list[float], weight_version: int) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.weight_versions += [weight_version] * len(token_ids)

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
        self._running: dict[str, _Request] = {}
        self._failure: Exception | None = None
        self._weight_version = 0
        self._thread = threading.Thread(target=self._serve, name="vllm", daemon=True)
        self._thread.start()
        self._between_steps(lambda: super(StreamingVllmBackend, self).setup(setup))

    def submit(self, names: list[int], batch: BatchedDataDict) -> None:
        """Takes requests over and returns at once.

        Args:
            names: `B` of them, by which `poll` calls the completions.
            batch: As for `generate`; the draws are under the temperature.
        """
        prompts = [
            ids[:length].tolist()
            for ids, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
        ]
        limit = self._setup.config.max_new_tokens
        limits = batch["max_new_tokens"].tolist() if "max_new_tokens" in batch else None
        seeds = batch["seeds"].tolist()
        requests = [
            _Request(*each) for each in zip(names, prompts, seeds, limits or [limit] * len(names), strict=True)
        ]
        self._between_steps(lambda: self._start(requests))

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """The completions that are done and were not returned before, by name.

        Args:
            wait_seconds: For the first of them.

        Raises:
            Exception: What the engine raised.
        """
        found = []
        timeout: float | None = wait_seconds
        while True:
            try:
                found.append(self._finished.get(timeout=timeout) if timeout else self._finished.get_nowait())
            except queue.Empty:
                if self._failure is not None:
                    raise self._failure
                return found
            timeout = None

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

    def update_weights(self, buckets: list[WeightBucket], weight_version: int = 0) -> str:
        """Replaces all weights between two steps; completions under way go on with the new ones.

        Args:
            buckets: All weights.
            weight_version: What tokens drawn from now on are marked with.

        Returns:
            The digest of what arrived.
        """

        def replace() -> str:
            waiting = self._interrupt()
            digest = super(StreamingVllmBackend, self).update_weights(buckets)
            self._weight_version = weight_version
            self._start(waiting)
            return digest

        return self._between_steps(replace)

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of a folder, and gives up what an earlier caller left."""

        def begin_anew() -> None:
            self._interrupt()
            super(StreamingVllmBackend, self).load_weights(model_folder)
            self._weight_version = 0

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
                self._running.clear()

    def _params(self, seed: int, max_new_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self._setup.config.temperature, seed=seed, max_tokens=max_new_tokens, logprobs=0,
            stop_token_ids=list(self._setup.stop_token_ids), ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            request = self._running.get(output.request_id)
            if request is None:
                continue  # given up in the meantime
            made = output.outputs[0]
            tokens = list(made.token_ids)
            logprobs = [
                step[token].logprob for token, step in zip(tokens, made.logprobs, strict=True)
            ]
            request.take(tokens, logprobs, self._weight_version)
            if output.finished:
                del self._running[output.request_id]
                truncated = made.finish_reason == "length"
                self._finished.put((request.name, request.completion(truncated=truncated)))

    def _start(self, requests: list[_Request]) -> None:
        for request in requests:
            params = self._params(
                request.part_seed(), request.max_new_tokens - len(request.token_ids)
            )
            prompt: Any = {"prompt_token_ids": request.prompt + request.token_ids}
            self._llm.llm_engine.add_request(request.engine_name, prompt, params)
            self._running[request.engine_name] = request

    def _interrupt(self) -> list[_Request]:
        """Takes every request out of the engine, ready to be started again."""
        interrupted = list(self._running.values())
        self._abort(interrupted)
        for request in interrupted:
            request.part += 1
        return interrupted

    def _abort(self, requests: list[_Request]) -> None:
        self._llm.llm_engine.abort_request([request.engine_name for request in requests])
        for request in requests:
            del self._running[request.engine_name]
