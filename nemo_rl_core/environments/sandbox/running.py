"""One program in the sandbox: its limits, its pipes, and how it ended."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nemo_rl_core.errors import ResourceError

_GRACE_SECONDS = 30.0
"""What the launcher gets past the program's deadline on a busy machine, before it is killed."""
_LAUNCHER = Path(__file__).with_name("launcher.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_seconds: Of each of its processes. The bound that ends an endless loop, so that the
            verdict does not depend on how busy the machine is.
        wall_seconds: Of the whole run, for a program that waits.
        memory_mib: Address space of each of its processes.
        disk_mib: Of all its files together; they lie in memory.
        num_processes: Processes and threads at once, itself included.
        output_bytes: Of stdout, and of stderr; a program that writes more is ended.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory_mib: int = 512
    disk_mib: int = 16
    num_processes: int = 4
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended.

    Attributes:
        stdout: What it wrote, up to the limit.
        stderr: Likewise.
        exit_code: Negative: the signal that ended it. None: the sandbox ended it.
        timed_out: It passed `wall_seconds`.
        output_cut: It wrote more than `output_bytes`.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    output_cut: bool

    @property
    def succeeded(self) -> bool:
        """It ended by itself, with exit code 0, and all its output is here."""
        return self.exit_code == 0 and not self.output_cut


class Running:
    """A program that has been started, and its pipes."""

    def __init__(
        self, payload: Mapping[str, Any], limits: Limits, stdin: int | None, stdout: int
    ) -> None:
        self._limits = limits
        self._is_asked_to_end = False
        given = os.memfd_create("payload")
        report, report_write = os.pipe()
        self._report: IO[bytes] = os.fdopen(report, "rb")
        # Inherited: a signal reaches the launcher once it can end what it has started.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            os.write(given, json.dumps(payload).encode())
            os.lseek(given, 0, os.SEEK_SET)
            command = [sys.executable, "-I", "-S", str(_LAUNCHER), str(given), str(report_write)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=(given, report_write),
                env={},
            )
        except OSError as error:
            self._report.close()
            raise no_sandbox(str(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(given)
            os.close(report_write)

    @property
    def pid(self) -> int:
        """Process id of the launcher, whose children are the program."""
        return self._process.pid

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every process of the program; returns when they have ended."""
        self._process.terminate()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr, self._report):
            if pipe is not None:
                pipe.close()

    def terminate(self) -> None:
        """Asks for the end of every process of the program; `wait` says when."""
        self._is_asked_to_end = True
        self._process.terminate()

    def wait(self) -> Finished:
        """Reads until the program has ended.

        Raises:
            ResourceError: When the sandbox could not be built.
        """
        started = time.monotonic()
        collected = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe]
        contents: dict[Any, bytearray] = {p: bytearray() for p in (*collected, self._report)}
        cut = False
        with selectors.DefaultSelector() as open_pipes:
            for pipe in contents:
                open_pipes.register(pipe, selectors.EVENT_READ)
            while open_pipes.get_map():
                left = started + self._limits.wall_seconds + _GRACE_SECONDS - time.monotonic()
                for key, _ in open_pipes.select(max(left, 0)):
                    read = os.read(key.fd, 65536)
                    if not read:
                        open_pipes.unregister(key.fileobj)
                    elif not cut or key.fileobj is self._report:
                        contents[key.fileobj] += read
                too_long = any(len(contents[p]) > self._limits.output_bytes for p in collected)
                if left < 0:
                    self._process.kill()
                elif too_long and not cut:
                    cut = True
                    self._process.terminate()
        self._process.wait()
        return self._finished(contents, cut=cut)

    def _finished(self, contents: Mapping[Any, bytearray], *, cut: bool) -> Finished:
        limit = self._limits.output_bytes
        stdout, stderr = (
            "" if pipe is None else contents[pipe][:limit].decode(errors="replace")
            for pipe in (self._process.stdout, self._process.stderr)
        )
        said: dict[str, Any] = {}
        for line in contents[self._report].splitlines():
            said |= json.loads(line)
        # Once the program has started, whatever happens to the sandbox is the program's doing.
        has_begun = "started" in said or self._is_asked_to_end
        if not has_begun or "failed" in said:
            raise no_sandbox(said.get("failed") or f"the launcher died: {stderr[-300:]}")
        return Finished(stdout, stderr, said.get("exit_code"), said.get("timed_out", True), cut)


def no_sandbox(reason: str) -> ResourceError:
    """The error for a machine on which no sandbox can be built."""
    return ResourceError(
        "no sandbox can be built for programs of the policy",
        expected="Linux that lets this process make namespaces (unshare) and mount inside them",
        got=reason[:300],
        fix="allow unprivileged user namespaces, or give the container CAP_SYS_ADMIN; or use an "
        "environment that runs no programs",
    )
