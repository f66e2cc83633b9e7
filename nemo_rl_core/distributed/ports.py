"""Ports that are held from their choice to their use."""

import socket
from collections import deque
from collections.abc import Iterable

_held: deque[socket.socket] = deque(maxlen=64)
"""A rendezvous listens soon: what was held long ago is not waited for any more."""


def hold_port(candidates: Iterable[int], *, host: str = "") -> int | None:
    """Takes a port for a rendezvous that listens on it later, in this or another process.

    A socket is bound to it and does not listen. Linux gives such a port to nobody by itself, and
    refuses it to those who bind it plainly, as this function does. It lets a server listen that
    asks for the reuse of addresses, as those of torch do.

    Args:
        candidates: Ports to try in turn; 0 is any that is free.
        host: Address to bind; all of this machine by default.

    Returns:
        The port, held until this process ends or has taken 64 others; None if all are taken.
    """
    for candidate in candidates:
        held = socket.socket()
        try:
            held.bind((host, candidate))
        except OSError:
            held.close()
            continue
        port = int(held.getsockname()[1])
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if _can_listen(host, port):
            _held.append(held)
        else:
            held.close()  # a kernel that lets nobody listen: free, and not held
        return port
    return None


def _can_listen(host: str, port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen()
        except OSError:
            return False
    return True
