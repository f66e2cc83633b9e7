"""Ports that are reserved before they are used, and stores that listen on one address."""

import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"

_reserved: deque[socket.socket] = deque(maxlen=64)
"""Sockets of the newest reservations; a rendezvous listens soon, so older ones can go."""


def host_store(address: str, port: int, **options: Any) -> "TCPStore":
    """Returns a `TCPStore` that listens on one address of this machine.

    By default torch's store listens on every interface, whatever its address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server(
        (address, port), family=_family(address), backlog=socket.SOMAXCONN
    )
    port, descriptor = listener.getsockname()[1], listener.detach()
    try:
        return TCPStore(address, port, is_master=True, master_listen_fd=descriptor, **options)
    except BaseException:
        os.close(descriptor)
        raise


def hold_port(candidates: Iterable[int], *, host: str) -> int | None:
    """Reserves a port for a rendezvous that listens on it later, in this or another process.

    Binds a socket to the port without listening. Linux then does not assign the port to anybody,
    and refuses a plain `bind`, such as this function's. It still lets a server listen that sets
    SO_REUSEADDR, as torch's do.

    Args:
        candidates: Ports to try in turn; 0 is any free port.

    Returns:
        The port, reserved until this process ends or has reserved 64 others; None if all are taken.
    """
    for candidate in candidates:
        holder = socket.socket(_family(host))
        try:
            holder.bind((host, candidate))
        except OSError:
            holder.close()
            continue
        port = int(holder.getsockname()[1])
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if _can_listen(host, port):
            _reserved.append(holder)
        else:
            holder.close()  # a kernel that lets nobody listen: the port is free, not reserved
        return port
    return None


def _can_listen(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen()
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
