"""The line between trainer and engines on which a transfer of weights is agreed, over gloo.

Besides the groups that a trainer's or an engine's ranks form among themselves: rank 0 is the
trainer's first rank, the others are the engine's workers. A process that dies closes its
connections, so that its peers get an error at once; one that is stuck runs into the timeout.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.errors import TransferError

CarrierName = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]
SENDER = 0
_LENGTH_BYTES = 8
_HEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class WeightRoute:
    """What both ends must know to find one another.

    Attributes:
        host: Where the meeting point listens.
        port: Its port.
        num_receivers: How many engine workers take every transfer.
        carrier: What the bytes travel by.
        timeout_seconds: For which one end waits for the others.
    """

    host: str
    port: int
    num_receivers: int
    carrier: CarrierName
    timeout_seconds: float


class RouteHost:
    """The meeting point of one route, in the process that starts both ends; they outlive it.

    A route whose transfer has failed is used up: the next one needs a host of its own.

    Args:
        num_receivers: Engine workers.
        carrier: What the bytes travel by; see `carrier_between`.
        host: This machine's address, as both ends reach it.
        timeout_seconds: For which one end waits for the others.

    Attributes:
        route: For `WeightSender` and `WeightReceiver`.
    """

    def __init__(
        self,
        *,
        num_receivers: int,
        carrier: CarrierName,
        host: str = "127.0.0.1",
        timeout_seconds: float = 600.0,
    ) -> None:
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.route = WeightRoute(host, self._store.port, num_receivers, carrier, timeout_seconds)

    def close(self) -> None:
        """Whoever still waits for another end gets an error now, and not after the timeout."""
        self._store = None


class Channel:
    """One end of the line; waits until all ends are there.

    Args:
        route: From the host.
        rank: `SENDER`, or the receiver's place from 1 on.

    Attributes:
        group: Of the sender and all receivers.
        store: What they met at.

    Raises:
        TransferError: If the others do not come in time; of every method, if one of them is gone.
    """

    def __init__(self, route: WeightRoute, rank: int) -> None:
        timeout = timedelta(seconds=route.timeout_seconds)
        with _other_end():
            self.store = TCPStore(route.host, route.port, is_master=False, timeout=timeout)
            self.group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore("control", self.store), rank, route.num_receivers + 1, timeout
            )
        self.route, self.rank = route, rank

    def send(self, frame: dict[str, Any]) -> None:
        """Tells all receivers something that JSON can say."""
        encoded = json.dumps(frame).encode()
        # One message for all but the longest: receivers need not be woken twice.
        head = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded[:_HEAD_BYTES]
        padded = bytearray(head.ljust(_LENGTH_BYTES + _HEAD_BYTES))
        self.broadcast(torch.frombuffer(padded, dtype=torch.uint8), SENDER)
        if len(encoded) > _HEAD_BYTES:
            rest = bytearray(encoded[_HEAD_BYTES:])
            self.broadcast(torch.frombuffer(rest, dtype=torch.uint8), SENDER)

    def receive(self) -> dict[str, Any]:
        """What the sender tells."""
        padded = torch.empty(_LENGTH_BYTES + _HEAD_BYTES, dtype=torch.uint8)
        self.broadcast(padded, SENDER)
        head = padded.numpy().tobytes()
        length = int.from_bytes(head[:_LENGTH_BYTES], "big")
        encoded = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > _HEAD_BYTES:
            rest = torch.empty(length - _HEAD_BYTES, dtype=torch.uint8)
            self.broadcast(rest, SENDER)
            encoded += rest.numpy().tobytes()
        frame: dict[str, Any] = json.loads(encoded)
        return frame

    def gathered(self, own: str) -> list[str]:
        """What every receiver says, in order of rank; all say strings of one length."""
        said = []
        for rank in range(1, self.route.num_receivers + 1):
            buffer = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
            self.broadcast(buffer, rank)
            said.append(buffer.numpy().tobytes().decode(errors="replace"))
        return said

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fills the tensor with that of rank `root`, at all ends."""
        with _other_end():
            if self.group is None:
                raise RuntimeError("the line was closed after an error")
            self.group.broadcast(tensor, root).wait()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Hangs up, so that whoever waits for this end gets an error now."""
        self.group = None


@contextmanager
def _other_end() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo and of the store alike
        raise TransferError(
            "a transfer of weights broke off",
            expected="trainer and engine workers at both ends of it",
            got=str(error).splitlines()[0],
            fix="run the same command again: it resumes from the last save; look above for the "
            "first error of a worker",
        ) from error
