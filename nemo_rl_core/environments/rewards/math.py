"""Answers checked by math-verify, in processes that can be stopped."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import LifoQueue
from typing import IO, Any

from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.environments.interfaces import Scorer, attempt
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout

_START_SECONDS = 120.0
_LOST_SECONDS = 600.0
"""A process that has given no reply for so long is lost; its limits end it long before."""


class MathScorer(Scorer):
    """1.0 when math-verify finds the completion's final answer equal to the reference, else 0.0.

    A completion in which no mathematics is found scores 0, and so does one that cannot be compared
    within the limits. The reference answer is checked once, apart: one that is no mathematics, does
    not equal itself, or reaches the limits by itself is an error, and so is a comparison that
    raises.

    Args:
        config: The limits.
    """

    def __init__(self, config: MathVerify | None = None) -> None:
        self._config = config or MathVerify()
        # The last that was used is the first to be used again: one at a time needs no second.
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        for _ in range(self._config.num_parallel):
            self._idle.put(None)
        self._references: dict[str, str | None] = {}

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; equal completions of equal answers are compared once."""
        asked = {(r.prompt.answer, r.text): r for r in rollouts}
        answers = {r.prompt.answer for r in rollouts} - self._references.keys()
        with ThreadPoolExecutor(self._config.num_parallel) as pool:
            self._references |= zip(answers, pool.map(self._fault, answers), strict=True)
            found = dict(zip(asked, pool.map(self._outcome, asked.values()), strict=True))
        return [found[r.prompt.answer, r.text] for r in rollouts]

    def are_equal(self, answer: str, other: str) -> bool:
        """Whether two final answers are equal, as far as the limits allow to tell."""
        try:
            return self._ask(answer, other).get("score") == 1.0
        except (TimeoutError, OSError):
            return False

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """The answer, where the row has none."""
        return () if prompt.answer else ("answer",)

    def close(self) -> None:
        """Ends the child processes; the next call of `score` starts others."""
        workers = [self._idle.get() for _ in range(self._config.num_parallel)]
        for worker in workers:
            if worker is not None:
                worker.stop()
            self._idle.put(None)

    def _outcome(self, rollout: Rollout) -> float | RewardError:
        return attempt(
            partial(self._compare, rollout.prompt.answer, rollout.text),
            prompt=rollout.prompt.text,
            completion=rollout.text,
            source="math-verify",
        )

    def _compare(self, answer: str, completion: str) -> float:
        fault = self._references[answer]
        if fault is not None:
            raise ValueError(fault)
        reply = self._ask(answer, completion)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply.get("score", 0.0))

    def _fault(self, answer: str) -> str | None:
        """What is wrong with a reference answer."""
        try:
            reply = self._ask(answer, None)
        except (TimeoutError, OSError):
            # Nothing is known about the answer; the comparison asks a new process.
            return None
        if reply.get("score") == 1.0:
            return None
        why = reply.get("error") or reply.get("limit") or "it does not equal itself"
        return f"the reference answer {answer[:80]!r} cannot be compared: {why}"

    def _ask(self, answer: str, completion: str | None) -> dict[str, Any]:
        limits = self._config.model_dump(include={"max_calls", "cpu_seconds"})
        worker = self._idle.get()
        try:
            worker = worker or _Worker()
            return worker.ask({"answer": answer, "completion": completion, **limits})
        except BaseException:
            # It is lost, dead or in the middle of a reply: the next completion gets a new one.
            if worker is not None:
                worker.stop()
                worker = None
            raise
        finally:
            self._idle.put(worker)


class _Worker:
    """A running `math_worker` and its two pipes."""

    def __init__(self) -> None:
        search_path = os.pathsep.join(path or os.curdir for path in sys.path)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "nemo_rl_core.environments.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Sets of text have the same order in every process.
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"},
            # Ctrl-C is for the parent, which closes its scorers.
            start_new_session=True,
        )
        try:
            self._read_line(_START_SECONDS)
        except (TimeoutError, OSError):
            self.stop()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            TimeoutError: When there is none in time.
            OSError: When the process is dead.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._read_line(_LOST_SECONDS))
        return reply

    def stop(self) -> None:
        """Kills the process; it holds nothing that could be lost."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # Closing flushes what a dead process will not read.
                continue
        self._process.wait()

    def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()  # unlike select, with descriptors above 1,023 too
        poll.register(descriptor, select.POLLIN)
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = max(deadline - time.monotonic(), 0)
            if not poll.poll(1000 * left):
                raise TimeoutError(f"the checking process gave no reply within {seconds:g} s")
            read = os.read(descriptor, 65536)
            if not read:
                raise ConnectionError(f"the checking process died: {self._last_words()}")
            line += read
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}{', ' + lines[-1][:200] if lines else ''}"
