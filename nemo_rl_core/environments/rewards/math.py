"""Scores answers with math-verify, in processes that can be killed."""

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import LifoQueue
from typing import IO, Any

from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.environments.interfaces import Scorer, attempt, error_context
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout

_START_SECONDS = 120.0
_LOST_SECONDS = 600.0
"""Time without a reply after which a process counts as lost; its limits end it long before."""
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
"""Reference answers that need no check."""
_BATCH = 20
"""Reference answers per request, since forking the process costs more than a check."""


class MathScorer(Scorer):
    """Scores 1.0 if math-verify finds the final answer equal to the reference, else 0.0.

    A completion without mathematics scores 0, and so does one that cannot be compared within the
    limits. The reference answer is checked once, separately: one that cannot be read, does not
    equal itself, or already exceeds the limits is an error. A comparison that raises is an error
    too.
    """

    def __init__(self, config: MathVerify | None = None) -> None:
        self._config = config or MathVerify()
        # Last in, first out: sequential calls use only one process.
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        for _ in range(self._config.num_parallel):
            self._idle.put(None)
        self._references: dict[str, str | None] = {}

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout; equal pairs of completion and answer run once."""
        unique = {(r.prompt.answer, r.text): r for r in rollouts}
        self.faults({r.prompt.answer for r in rollouts})
        with ThreadPoolExecutor(self._config.num_parallel) as pool:
            outcomes = dict(zip(unique, pool.map(self._outcome, unique.values()), strict=True))
        return [outcomes[r.prompt.answer, r.text] for r in rollouts]

    def faults(self, answers: Collection[str]) -> dict[str, str]:
        """Returns the fault of each reference answer that cannot be compared."""
        new = [each for each in answers if each not in self._references]
        self._references |= {each: None for each in new if _NUMBER.fullmatch(each)}
        new = [each for each in new if each not in self._references]
        batches = [new[at : at + _BATCH] for at in range(0, len(new), _BATCH)]
        with ThreadPoolExecutor(self._config.num_parallel) as pool:
            for batch_faults in pool.map(self._checked, batches):
                self._references |= batch_faults
        faults = ((each, self._references[each]) for each in answers)
        return {each: fault for each, fault in faults if fault is not None}

    def are_equal(self, answer: str, other: str) -> bool:
        """Whether two final answers are equal; False if the comparison exceeds its limits."""
        try:
            return self._ask(completions=[answer, other]).get("score") == 1.0
        except (TimeoutError, OSError):
            return False

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """Returns `answer` if the row has none."""
        return () if prompt.answer else ("answer",)

    def close(self) -> None:
        """Ends the child processes; the next call of `score` starts new ones."""
        workers = [self._idle.get() for _ in range(self._config.num_parallel)]
        for worker in workers:
            if worker is not None:
                worker.stop()
            self._idle.put(None)

    def _outcome(self, rollout: Rollout) -> float | RewardError:
        score = partial(self._compare, rollout.prompt.answer, rollout.text)
        return attempt(score, **error_context(rollout, "math-verify"))

    def _compare(self, answer: str, completion: str) -> float:
        fault = self._references[answer]
        if fault is not None:
            raise ValueError(fault)
        reply = self._ask(answer=answer, completion=completion)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply.get("score", 0.0))

    def _checked(self, answers: Sequence[str]) -> dict[str, str | None]:
        fault = self._fault(answers)
        if fault is None or len(answers) == 1:
            return dict.fromkeys(answers, fault)
        return {each: self._fault([each]) for each in answers}

    def _fault(self, answers: Sequence[str]) -> str | None:
        try:
            reply = self._ask(answers=answers)
        except (TimeoutError, OSError):
            # The answers may be fine; the comparison uses a new process.
            return None
        if reply.get("score") == 1.0:
            return None
        why = reply.get("error") or reply.get("limit") or "it does not equal itself"
        return f"the reference answer {answers[0][:80]!r} cannot be compared: {why}"

    def _ask(self, **request: Any) -> dict[str, Any]:
        limits = self._config.model_dump(include={"max_calls", "cpu_seconds"})
        worker = self._idle.get()
        try:
            worker = worker or _Worker()
            return worker.ask({**request, **limits})
        except BaseException:
            # The worker is lost, dead or in the middle of a reply: the next completion gets a new
            # one.
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
            # So that sets of `str` have the same order in every process.
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"},
            # So that Ctrl-C interrupts only the parent, which closes its scorers.
            start_new_session=True,
        )
        try:
            self._read_line(_START_SECONDS)
        except (TimeoutError, OSError):
            self.stop()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._read_line(_LOST_SECONDS))
        return reply

    def stop(self) -> None:
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
        poll = select.poll()  # `select` does not support descriptors above 1,023
        poll.register(descriptor, select.POLLIN)
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            seconds_left = max(deadline - time.monotonic(), 0)
            if not poll.poll(1000 * seconds_left):
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
