"""Starts programs in the sandbox, reads what they say, and ends them."""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_core.environments.sandbox.running import Finished, Limits, Running, no_sandbox
from nemo_rl_core.environments.sandbox.seccomp import filter_program
from nemo_rl_core.environments.sandbox.slots import Slots

_MIB = 2**20
_log = logging.getLogger(__name__)


class Sandbox:
    """Runs Python programs that may be hostile.

    A program has the standard library of this interpreter and nothing else. What is guaranteed:

    - *No network*: a network namespace with no devices, and no `socket` system call. A pair of
      connected sockets, which asyncio needs, is allowed.
    - *No files*: its `/` is a small file system in memory with an empty `/program` and, read-only,
      the interpreter and the system's libraries. No `/proc`, no `/etc`, no store. It goes with the
      program.
    - *No other process* is to be seen or signalled: a process namespace of its own, whose end ends
      every daemon and thread in it. As root, each program has a user id that nobody else has;
      otherwise it has no capability in a user namespace.
    - *Bounds*, see `Limits`; memory is bounded for each process, so that all of them together have
      at most `memory_mib * num_processes`; the buffers of its pipes and sockets add at most 15 MiB
      per process. Where this process is the machine's root under another name (a user namespace
      made by root), the kernel does not count processes.
    - *No environment variables*, no descriptors but stdin, stdout and stderr.

    What is not: the kernel itself is shared (no virtual machine), and so are CPU time and the
    clock. Where the machine refuses namespaces, nothing runs, rather than with less protection.

    Args:
        limits: For each program.
        num_parallel: Maximum number of programs that compute at once; see `Slots`.
        extra_mib: Memory limit of what the caller starts in addition, in the same slot.

    Attributes:
        slots: Admission of programs; `run` takes a slot.

    Raises:
        ResourceError: When this machine cannot keep the guarantees (tried once, here).
    """

    def __init__(
        self, limits: Limits | None = None, *, num_parallel: int = 2, extra_mib: int = 0
    ) -> None:
        self._limits = limits or Limits()
        self.slots = Slots(num_parallel, self._limits.memory_mib + extra_mib)
        self._filter = filter_program(platform.machine()).hex()
        probe = self.run({"main.py": "print(6 * 7)"})
        if not probe.succeeded or probe.stdout != "42\n":
            raise no_sandbox(f"a first program ended with {probe}")
        _log.info(
            "sandbox: network, process, mount and IPC namespaces, a system call filter and %s",
            "a user of its own" if os.geteuid() == 0 else "a user namespace",
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
            stdin: What the program can read there.
            limits: In place of the sandbox's own.
            readable: Further folders that the program can read.

        Raises:
            ResourceError: When the sandbox could not start; never by what the program does.
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
        """Starts `main.py`; the caller takes a slot.

        Args:
            files: As in `run`.
            stdin: Text, or an open descriptor.
            stdout: An open descriptor; by default, it is collected.
            limits: In place of the sandbox's own.
            readable: Further folders that the program can read.

        Returns:
            A context manager: when it is left, nothing of the program is left.
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
