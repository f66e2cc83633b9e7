"""Starts programs in the sandbox, collects their output, and ends them."""

import json
import logging
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nemo_rl_core.environments.sandbox.seccomp import filter_program
from nemo_rl_core.environments.sandbox.slots import Slots
from nemo_rl_core.errors import ResourceError

_MIB = 2**20
_log = logging.getLogger(__name__)
_GRACE_SECONDS = 30.0
"""Time between the program's deadline and the kill of the launcher, for busy machines."""
_LAUNCHER = Path(__file__).with_name("launcher.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        cpu_seconds: CPU time of each process. This limit ends endless loops, so that the verdict
            does not depend on the load of the machine.
        wall_seconds: Duration of the run, for programs that wait.
        memory_mib: Address space of each process.
        disk_mib: Total size of all files, which are kept in memory.
        num_processes: Number of processes and threads at once, including the program itself.
        output_bytes: Size of stdout, and of stderr. A program that writes more to stdout is ended;
            the rest of stderr is dropped.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory_mib: int = 512
    disk_mib: int = 16
    num_processes: int = 4
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program, whose output is cut at the limit.

    `exit_code` is negative for a signal, and None if the sandbox ended the program.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    output_cut: bool

    @property
    def succeeded(self) -> bool:
        """Whether the program ended with exit code 0, and its output is complete."""
        return self.exit_code == 0 and not self.output_cut


class Sandbox:
    """Runs Python programs that may be hostile.

    A program has only the standard library of this interpreter. The sandbox guarantees:

    - *No network*: a network namespace without devices, and no `socket` system call. A pair of
      connected sockets, which asyncio needs, is allowed.
    - *No files*: the root is a small file system in memory with an empty `/program` and, read-only,
      the interpreter and the system's libraries. There is no `/proc`, `/etc` or store. The file
      system disappears with the program.
    - *No other processes*: a program cannot see or signal any. It has a separate process namespace,
      whose end ends every daemon and thread in it. If this process is root, each program gets a
      separate user id; otherwise it has no capability in a user namespace.
    - *Limits*, see `Limits`. Memory is limited per process, so that all processes together have at
      most `memory_mib * num_processes`; the buffers of pipes and sockets add at most 15 MiB per
      process. If this process is root in a user namespace made by root, the kernel does not count
      processes.
    - *No environment variables*, and no descriptors except stdin, stdout and stderr.

    It does not isolate the kernel (it is not a virtual machine), CPU time or the clock. Nothing
    runs with less protection: on a machine that does not allow namespaces, every run fails.

    Args:
        limits: Limits of each program.
        num_parallel: Maximum number of programs that compute at once; see `Slots`.
        extra_mib: Memory limit of other programs that the caller starts in the same slot.

    Attributes:
        slots: Admission of programs; `run` takes a slot.

    Raises:
        ResourceError: If this machine cannot provide the guarantees (tried once, here).
    """

    def __init__(
        self, limits: Limits | None = None, *, num_parallel: int = 2, extra_mib: int = 0
    ) -> None:
        self._limits = limits or Limits()
        self.slots = Slots(num_parallel, self._limits.memory_mib + extra_mib)
        self._filter = filter_program(platform.machine()).hex()
        probe = self.run({"main.py": "print(6 * 7)"})
        if not probe.succeeded or probe.stdout != "42\n":
            raise _no_sandbox(f"a test program ended with {probe}")
        _log.info(
            "sandbox: network, process, mount and IPC namespaces, a system call filter and %s",
            "a separate user" if os.geteuid() == 0 else "a user namespace",
        )

    def run(
        self,
        files: Mapping[str, str],
        *,
        stdin: str = "",
        limits: Limits | None = None,
        readable: Sequence[str] = (),
    ) -> Finished:
        """Runs `main.py` of the files to its end.

        Args:
            files: Contents of `/program`, by relative path.
            stdin: Text of the standard input.
            limits: Limits to use instead of the sandbox's.
            readable: Further folders that the program can read.

        Raises:
            ResourceError: If the sandbox could not start; a program cannot cause it.
        """
        with (
            self.slots.taken() as slot,
            self.start(files, stdin=stdin, limits=limits, readable=readable) as running,
        ):
            slot.watch(running.pid)
            return running.wait()

    def start(
        self,
        files: Mapping[str, str],
        *,
        stdin: str | int = "",
        stdout: int = subprocess.PIPE,
        limits: Limits | None = None,
        readable: Sequence[str] = (),
    ) -> "Running":
        """Starts `main.py`; the caller takes a slot, and leaving the context ends all processes.

        `stdin` is a text or an open descriptor. Without a descriptor as `stdout`, the output is
        collected. The other arguments are the same as in `run`.
        """
        limits = limits or self._limits
        folders = (sys.base_prefix, *readable)
        mounts = ["/lib", "/lib64", "/usr", "/dev/null"]
        mounts += [path for path in folders if not Path(path).is_relative_to("/usr")]
        payload = {
            "files": dict(files),
            "stdin": stdin if isinstance(stdin, str) else None,
            "argv": [
                os.path.realpath(sys.executable),
                "-s",
                "-S",
                "-X",
                "utf8",
                "/program/main.py",
            ],
            "mounts": mounts,
            "seccomp": self._filter,
            "wall_seconds": limits.wall_seconds,
            "disk_bytes": limits.disk_mib * _MIB,
            "limits": {
                "RLIMIT_CPU": limits.cpu_seconds,
                "RLIMIT_AS": limits.memory_mib * _MIB,
                "RLIMIT_FSIZE": limits.disk_mib * _MIB,
                "RLIMIT_NPROC": limits.num_processes,
                "RLIMIT_NOFILE": 64,
                "RLIMIT_CORE": 0,
            },
        }
        return Running(payload, limits, stdin if isinstance(stdin, int) else None, stdout)


class Running:
    """A running program and its pipes."""

    def __init__(
        self, payload: Mapping[str, Any], limits: Limits, stdin: int | None, stdout: int
    ) -> None:
        self._limits = limits
        self._is_asked_to_end = False
        payload_fd = os.memfd_create("payload")
        report, report_write = os.pipe()
        self._report: IO[bytes] = os.fdopen(report, "rb")
        # The launcher inherits the mask, and unblocks SIGTERM once it can end its children.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            os.write(payload_fd, json.dumps(payload).encode())
            os.lseek(payload_fd, 0, os.SEEK_SET)
            descriptors = (payload_fd, report_write)
            command = [sys.executable, "-I", "-S", str(_LAUNCHER), *map(str, descriptors)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                env={},
            )
        except OSError as error:
            self._report.close()
            raise _no_sandbox(str(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(payload_fd)
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
        """Ends every process of the program, and waits for that."""
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
        """Starts to end every process of the program; `wait` waits for that."""
        self._is_asked_to_end = True
        self._process.terminate()

    def wait(self) -> Finished:
        """Collects the output until the program has ended."""
        started = time.monotonic()
        collected = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe]
        contents: dict[Any, bytearray] = {p: bytearray() for p in (*collected, self._report)}
        cut = False
        with selectors.DefaultSelector() as open_pipes:
            for pipe in contents:
                open_pipes.register(pipe, selectors.EVENT_READ)
            while open_pipes.get_map():
                seconds_left = (
                    started + self._limits.wall_seconds + _GRACE_SECONDS - time.monotonic()
                )
                for key, _ in open_pipes.select(max(seconds_left, 0)):
                    read = os.read(key.fd, 65536)
                    if not read:
                        open_pipes.unregister(key.fileobj)
                    elif key.fileobj is self._report or (
                        not cut and len(contents[key.fileobj]) <= self._limits.output_bytes
                    ):
                        contents[key.fileobj] += read
                too_long = len(contents.get(self._process.stdout, b"")) > self._limits.output_bytes
                if seconds_left < 0:
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
        report: dict[str, Any] = {}
        for line in contents[self._report].splitlines():
            report |= json.loads(line)
        # If the launcher dies after the program's start, the program has caused it.
        has_begun = "started" in report or self._is_asked_to_end
        if not has_begun or "failed" in report:
            raise _no_sandbox(report.get("failed") or f"the launcher died: {stderr[-300:]}")
        return Finished(stdout, stderr, report.get("exit_code"), report.get("timed_out", True), cut)


def _no_sandbox(reason: str) -> ResourceError:
    return ResourceError(
        "no sandbox can be built for programs of the policy",
        expected="Linux that lets this process make namespaces (unshare) and mount inside them",
        got=reason[:300],
        fix="allow unprivileged user namespaces, or give the container CAP_SYS_ADMIN; or use an "
        "environment that runs no programs",
    )
