"""A port belongs to its rendezvous from the moment it is chosen."""

import errno
import socket
import subprocess
import sys

import psutil
import pytest
from torch.distributed import TCPStore

from nemo_rl_core.distributed.ports import LOOPBACK, hold_port, host_store

HOLDS = """
from nemo_rl_core.distributed.ports import hold_port
print(hold_port([0], host="127.0.0.1"), flush=True)
input()
"""


def bound_plainly(port: int) -> int:
    """Returns the error of another program that takes the port."""
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind(("", port))
    return refused.value.errno or 0


def test_reserved_port_is_refused_to_others_but_usable_by_a_rendezvous() -> None:
    port = hold_port([0], host=LOOPBACK)
    assert port
    assert bound_plainly(port) == errno.EADDRINUSE
    assert (
        hold_port([port], host=LOOPBACK) is None
    )  # for another group of workers that chooses the same port
    store = host_store(LOOPBACK, port, wait_for_workers=False)
    store.set("key", "value")
    assert TCPStore(LOOPBACK, port).get("key") == b"value"


def test_port_is_reserved_for_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        assert bound_plainly(port) == errno.EADDRINUSE
        assert host_store(LOOPBACK, port, wait_for_workers=False).port == port
        holder.communicate("\n")


def test_the_first_port_that_is_free_is_taken() -> None:
    with socket.socket() as listens:
        listens.bind(("", 0))
        listens.listen()
        taken = listens.getsockname()[1]
        assert hold_port([taken], host=LOOPBACK) is None
        assert hold_port([taken, 0], host=LOOPBACK) not in (None, taken)


def test_store_listens_only_on_its_address() -> None:
    store = host_store(LOOPBACK, 0, wait_for_workers=False)
    listening = psutil.Process().net_connections()
    assert [
        each.laddr.ip
        for each in listening
        if each.laddr.port == store.port and each.status == "LISTEN"
    ] == [LOOPBACK]
    with pytest.raises(OSError, match="in use"):
        host_store(LOOPBACK, store.port)
