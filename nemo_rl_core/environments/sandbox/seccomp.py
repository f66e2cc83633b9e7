"""The system calls that no program in the sandbox needs, as a filter for the kernel.

Namespaces and resource limits leave gaps that this closes: sockets outside the network namespace
(`AF_VSOCK`, `AF_ALG`), memory that belongs to no process (System V segments, memfds, a tmpfs
mounted in a namespace of the program's own), and other processes' memory and limits.

The kernel's buffers count for no limit of a process either. Pairs of sockets are allowed, since
asyncio opens one, and so are pipes; but neither can be made larger, hold descriptors of others
(`sendmsg`) or hold pages of the process (`vmsplice`). With 64 descriptors, the default sizes bound
them to about 15 MiB per process.
"""

import errno
import struct

from nemo_rl_core.errors import ResourceError

_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "socket": 41,
        "sendmsg": 46,
        "setsockopt": 54,
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "ptrace": 101,
        "pivot_root": 155,
        "mount": 165,
        "umount2": 166,
        "mq_open": 240,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "vmsplice": 278,
        "perf_event_open": 298,
        "sendmmsg": 307,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "socket": 198,
        "sendmsg": 211,
        "setsockopt": 208,
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "ptrace": 117,
        "pivot_root": 41,
        "mount": 40,
        "umount2": 39,
        "mq_open": 180,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "unshare": 97,
        "vmsplice": 75,
        "perf_event_open": 241,
        "sendmmsg": 269,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
    },
}
"""From Linux' `asm/unistd_64.h` and `asm-generic/unistd.h`."""

_SINCE_UNIFIED = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "memfd_secret": 447,
}
"""Newer calls have one number everywhere."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_SET_PIPE_SIZE = 1031
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_NEW = 0x7E020000
"""Every `CLONE_NEW*` flag of `linux/sched.h` that clone takes."""
_FOREIGN_ABI = 0x40000000
"""The bit that marks x86-64's second set of system call numbers (x32)."""

# Of `linux/bpf_common.h`: load a word, jump if equal / greater or equal / any bit, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: As `platform.machine()` says it.

    Raises:
        ResourceError: For a machine whose system call numbers are not known here.
    """
    if machine not in _NUMBERS:
        raise ResourceError(
            "the sandbox does not know this machine's system calls",
            expected=f"one of {', '.join(_NUMBERS)}",
            got=machine,
            fix="use an environment that runs no programs",
        )
    refuse = _instruction(_RETURN, _FAIL | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], then=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _FOREIGN_ABI, otherwise=1),
        refuse,
    ]
    for number in (*_NUMBERS[machine].values(), *_SINCE_UNIFIED.values()):
        program += [_instruction(_EQUAL, number, otherwise=1), refuse]
    program += [
        # Its flags lie in memory, where a filter cannot look: libc falls back to clone.
        _instruction(_EQUAL, _CLONE3, otherwise=1),
        _instruction(_RETURN, _FAIL | errno.ENOSYS),
        # A program may read and lower its own limits (process 0), nobody else's.
        _instruction(_EQUAL, _PRLIMIT[machine], otherwise=4),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_EQUAL, 0, otherwise=1),
        _instruction(_RETURN, _ALLOW),
        refuse,
        _instruction(_EQUAL, _FCNTL[machine], otherwise=4),
        _instruction(_LOAD, _SECOND_ARGUMENT_AT),
        _instruction(_EQUAL, _SET_PIPE_SIZE, otherwise=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _CLONE[machine], otherwise=3),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _CLONE_NEW, otherwise=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)
