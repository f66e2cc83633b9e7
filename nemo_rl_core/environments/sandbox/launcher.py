"""Script that builds the sandbox and becomes the program; started by `Sandbox`.

It uses only the standard library, since it starts once per program.

There are three processes. This one waits for the second, and kills it at the deadline. The second
has the process id 1 in a new process namespace: when it ends, the kernel ends everything in the
namespace, including daemons. The third drops its privileges and becomes the program.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 2, 4
_DETACH = 2
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads the payload from the descriptor in the first argument, reports on the second one."""
    payload_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (payload_fd, report_fd):
        os.set_inheritable(descriptor, False)
    with open(payload_fd, "rb") as file:
        payload = json.load(file)
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)
    # A separate process group, so that the program cannot signal processes outside the sandbox.
    os.setsid()
    # Broad on purpose: a failure here is the sandbox's, not the program's.
    try:
        _supervise(payload, report_fd)
    except Exception as error:  # noqa: BLE001 (reported)
        _report(report_fd, failed=f"{type(error).__name__}: {error}")


def _supervise(payload: dict[str, Any], report_fd: int) -> None:
    privileged = os.geteuid() == 0
    identity = _identity(privileged)
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags if privileged else flags | _NEW_USER)
    if not privileged:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{identity} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{identity} {gid} 1")
    # Only now: a process that is not dumpable may not write the files above.
    _call("prctl", _SET_DUMPABLE, 0)
    alive_read, alive_write = os.pipe()
    wake_read, wake_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake_write, b"x"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    init = os.fork()
    if init == 0:
        os.close(alive_write)
        # Broad on purpose, as in main; this process must never return to main's code.
        try:
            _init(payload, report_fd, alive_read, identity)
        except BaseException as error:  # noqa: BLE001 (reported)
            _report(report_fd, failed=f"{type(error).__name__}: {error}")
        os._exit(1)
    handle = os.pidfd_open(init)
    ready = select.select([handle, wake_read], [], [], payload["wall_seconds"])[0]
    if handle not in ready:
        os.kill(init, signal.SIGKILL)
    # Returns when the kernel has ended every process of the namespace.
    os.waitpid(init, 0)
    _report(report_fd, timed_out=not ready)


def _identity(privileged: bool) -> int:
    """Returns a user id that nothing else uses, so that process limits apply to each program."""
    if not privileged:
        return _NOBODY
    # One of the highest ids that exist here; concurrent launchers have different process ids.
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return max(int(first) + int(count) for first, _, count in ranges) - 2 - os.getpid() % 16384


def _init(payload: dict[str, Any], report_fd: int, alive: int, identity: int) -> NoReturn:
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)  # The parent died before the `prctl`.
    # The kernel ignores signals from inside to process 1 without a handler; Python installs some.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _build_root(payload, identity)
    program = os.fork()
    if program == 0:
        # Broad on purpose, as in main.
        try:
            _become(payload, report_fd, identity)
        except BaseException as error:  # noqa: BLE001 (reported)
            _report(report_fd, failed=f"{type(error).__name__}: {error}")
        os._exit(1)
    while True:
        ended, status = os.wait()
        if ended == program:
            _report(report_fd, exit_code=os.waitstatus_to_exitcode(status))
            os._exit(0)


def _build_root(payload: dict[str, Any], identity: int) -> None:
    """Makes a small file system in memory the root, with only `mounts` of the machine in it."""
    _mount(None, "/", None, _REC | _PRIVATE)
    size = f"size={payload['disk_bytes']},nr_inodes=4096,mode=755"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, size)
    old = Path("/tmp/old")
    old.mkdir()
    if _libc.pivot_root(b"/tmp", bytes(old)) != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    for path in payload["mounts"]:
        _show(Path(path))
    work = Path("/program")
    work.mkdir()
    for name, text in payload["files"].items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8", errors="replace")
    if os.geteuid() == 0:
        os.chown(work, identity, identity)
    if _libc.umount2(b"/old", _DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount2")
    Path("/old").rmdir()
    os.chdir(work)


def _show(path: Path) -> None:
    """Mounts a path of the machine read-only at the same path; links stay links."""
    before = Path("/old") / path.relative_to("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    if before.is_symlink():
        path.symlink_to(before.readlink())
    elif before.is_dir():
        path.mkdir(exist_ok=True)
        _mount(str(before), str(path), None, _BIND | _REC)
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY_NOSUID_NODEV, 0, 0, 0)
        code = _libc.syscall(
            _MOUNT_SETATTR, _AT_FDCWD, bytes(path), _AT_RECURSIVE, attributes, ctypes.c_size_t(32)
        )
        if code != 0:
            raise OSError(ctypes.get_errno(), f"mount_setattr of {path}")
    elif before.exists():
        path.touch()
        _mount(str(before), str(path), None, _BIND)


def _become(payload: dict[str, Any], report_fd: int, identity: int) -> None:
    os.setsid()
    # If not root, the program shares its user and so the limit with the launcher and process 1.
    extra = {"RLIMIT_NPROC": 0 if os.geteuid() == 0 else 2}
    for name, value in payload["limits"].items():
        most = value + extra.get(name, 0)
        resource.setrlimit(getattr(resource, name), (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    if payload["stdin"] is not None:
        _text_as_stdin(payload["stdin"])
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = bytes.fromhex(payload["seccomp"])
    program = _FilterProgram(len(instructions) // 8, instructions)
    _report(report_fd, started=True)
    _call("prctl", _SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
    # The user is not 0, so the kernel drops all capabilities when the program starts.
    # The variable makes sets of `str` have the same order in every run.
    os.execve(payload["argv"][0], payload["argv"], {"PYTHONHASHSEED": "0"})


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _text_as_stdin(text: str) -> None:
    with open(os.memfd_create("stdin"), "wb") as file:  # noqa: PTH123 (a descriptor)
        file.write(text.encode(errors="replace"))
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if each is None else each.encode() for each in (source, target, kind, options)]
    if _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _report(descriptor: int, **fields: Any) -> None:
    # The reader may be gone.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
