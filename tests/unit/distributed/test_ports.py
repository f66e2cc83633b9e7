"""A port belongs to its rendezvous from the moment it is chosen."""

import errno
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from nemo_rl_core.distributed.ports import hold_port

HOLDS = """
from nemo_rl_core.distributed.ports import hold_port
print(hold_port([0]), flush=True)
input()
"""


def bound_plainly(port: int) -> int:
    """The error of another program that takes the port."""
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind(("", port))
    return refused.value.errno or 0


def test_a_held_port_is_refused_to_others_and_given_to_a_rendezvous() -> None:
    port = hold_port([0])
    assert port
    assert bound_plainly(port) == errno.EADDRINUSE
    assert hold_port([port]) is None  # to another group of workers that chooses the same
    for use_libuv in (True, False):
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=use_libuv
        )
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port, use_libuv=use_libuv).get("key") == b"value"
        del store


def test_a_port_is_held_for_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        assert bound_plainly(port) == errno.EADDRINUSE
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port
        holder.communicate("\n")


def test_the_first_port_that_is_free_is_taken() -> None:
    with socket.socket() as listens:
        listens.bind(("", 0))
        listens.listen()
        taken = listens.getsockname()[1]
        assert hold_port([taken]) is None
        assert hold_port([taken, 0]) not in (None, taken)
