"""Answers checked by math-verify, in a process that can be stopped."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import IO, Any

from nemo_rl_core.environments.interfaces import Scorer, attempt
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_START_SECONDS = 120.0
_GRACE_SECONDS = 1.0
"""What the child gets past its own deadline to say that it passed, before it is killed."""


class MathScorer(Scorer):
    """1.0 when math-verify finds the completion's final answer equal to the reference, else 0.0.

    A completion in which no mathematics is found scores 0. A comparison that runs out of time or
    raises has no score: it is an error.

    Args:
        timeout_seconds: For one completion.
    """

    def __init__(self, *, timeout_seconds: float = 5.0) -> None:
        self._timeout_seconds = timeout_seconds
        self._worker: _Worker | None = None

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; equal completions of equal answers are compared once."""
        known: dict[tuple[str, str], float | RewardError] = {}
        found = []
        for rollout in rollouts:
            key = (rollout.prompt.answer, rollout.text)
            if key not in known:
                known[key] = attempt(
                    partial(self._compare, *key),
                    prompt=rollout.prompt.text,
                    completion=rollout.text,
                    source="math-verify",
                )
            found.append(known[key])
        return found

    def close(self) -> None:
        """Ends the child process; the next call of `score` starts another."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _compare(self, answer: str, completion: str) -> float:
        if self._worker is None:
            self._worker = _Worker()
        request = {
            "answer": answer,
            "completion": completion,
            "timeout_seconds": self._timeout_seconds,
        }
        try:
            reply = self._worker.ask(request, seconds=self._timeout_seconds + _GRACE_SECONDS)
        except (TimeoutError, OSError):
            # The child is stuck in C code, or dead: the next completion gets a fresh one.
            self.close()
            raise
        if "error" in reply:
            raise ValueError(reply["error"])
        if "timeout" in reply:
            raise TimeoutError(f"no result within {self._timeout_seconds:g} s")
        return float(reply["score"])


class _Worker:
    """A running `math_worker` and its two pipes."""

    def __init__(self) -> None:
        search_path = os.pathsep.join(path or os.curdir for path in sys.path)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "nemo_rl_core.environments.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": search_path},
            # Ctrl-C is for the parent, which closes its scorers.
            start_new_session=True,
        )
        try:
            self._read_line(_START_SECONDS)
        except (TimeoutError, OSError):
            self.stop()
            raise

    def ask(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            TimeoutError: When there is none in time.
            OSError: When the process is dead.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._read_line(seconds))
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
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = max(deadline - time.monotonic(), 0)
            if not select.select([descriptor], [], [], left)[0]:
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
