"""Seccomp filter that blocks system calls that no program in the sandbox needs.

It closes gaps of namespaces and resource limits: sockets outside the network namespace (`AF_VSOCK`,
`AF_ALG`), memory that no process owns (System V segments, memfds, a tmpfs mounted in a new
namespace), and the memory and limits of other processes. Pipes and socket pairs are allowed, since
asyncio opens one; but they cannot be enlarged, store other descriptors (`sendmsg`) or store pages
of the process (`vmsplice`). With 64 descriptors, they hold about 15 MiB per process.
"""

import errno
import struct

from nemo_rl_core.errors import ResourceError

_MACHINES = ("x86_64", "aarch64")
_NUMBERS = {
    "socket": (41, 198),
    "sendmsg": (46, 211),
    "setsockopt": (54, 208),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "vmsplice": (278, 75),
    "perf_event_open": (298, 241),
    "sendmmsg": (307, 269),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
"""Numbers by machine, from Linux' `asm/unistd_64.h` and `asm-generic/unistd.h`."""

_SINCE_UNIFIED = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "memfd_secret": 447,
}
"""Newer calls have the same number on all architectures."""

_CLONE = (56, 220)
_CLONE3 = 435
_PRLIMIT = (302, 261)
_FCNTL = (72, 25)
_SET_PIPE_SIZE = 1031
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_CLONE_NEW = 0x7E020000
"""All `CLONE_NEW*` flags of `linux/sched.h` that `clone` accepts."""
_FOREIGN_ABI = 0x40000000
"""Bit of x86-64's second set of system call numbers (x32)."""

# Of `linux/bpf_common.h`: load a word, jump if equal / greater or equal / any bit, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str) -> bytes:
    """Returns the filter for a `platform.machine()` as an array of `struct sock_filter`."""
    if machine not in _MACHINES:
        raise ResourceError(
            "the sandbox does not know this machine's system calls",
            expected=f"one of {', '.join(_MACHINES)}",
            got=machine,
            fix="use an environment that runs no programs",
        )
    index = _MACHINES.index(machine)
    refuse = _instruction(_RETURN, _FAIL | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[index], then=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _FOREIGN_ABI, otherwise=1),
        refuse,
    ]
    blocked = [numbers[index] for numbers in _NUMBERS.values()]
    for number in (*blocked, *_SINCE_UNIFIED.values()):
        program += [_instruction(_EQUAL, number, otherwise=1), refuse]
    program += [
        # A filter cannot read the flags of clone3, which are in memory: libc falls back to clone.
        _instruction(_EQUAL, _CLONE3, otherwise=1),
        _instruction(_RETURN, _FAIL | errno.ENOSYS),
        # A program may read and lower only its own limits (process 0).
        _instruction(_EQUAL, _PRLIMIT[index], otherwise=4),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_EQUAL, 0, otherwise=1),
        _instruction(_RETURN, _ALLOW),
        refuse,
        _instruction(_EQUAL, _FCNTL[index], otherwise=4),
        _instruction(_LOAD, _SECOND_ARGUMENT_AT),
        _instruction(_EQUAL, _SET_PIPE_SIZE, otherwise=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _CLONE[index], otherwise=3),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _CLONE_NEW, otherwise=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Encodes an instruction; a jump skips `then` instructions if it applies, or `otherwise`."""
    return struct.pack("HBBI", code, then, otherwise, value)
