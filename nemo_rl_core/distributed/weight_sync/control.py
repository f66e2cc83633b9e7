"""The control group of a link: a gloo process group, over which JSON frames go.

It exists besides the groups that a trainer's or an engine's ranks form among themselves: rank 0 is
the trainer's first rank, the others are the engine's workers. A process that dies closes its
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

TransportName = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]
SENDER = 0
"""The sender's rank in the group; receivers follow."""
_LENGTH_BYTES = 8
_HEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class LinkSpec:
    """What both ends of a link must know to meet.

    Attributes:
        host: Where a `TCPStore` listens, as long as endpoints may join.
        port: Its port.
        num_receivers: How many engine workers take every transfer.
        transport: How the bytes move; see `choose_transport`.
        timeout_seconds: For which one endpoint waits for the others.
    """

    host: str
    port: int
    num_receivers: int
    transport: TransportName
    timeout_seconds: float


class ControlGroup:
    """One endpoint's membership in the group; waits until all have joined.

    Args:
        link: Where they meet.
        rank: `SENDER`, or the receiver's index from 1 on.

    Attributes:
        store: What they meet at.

    Raises:
        TransferError: If the others do not join in time; of every method, if one of them is gone.
    """

    def __init__(self, link: LinkSpec, rank: int) -> None:
        timeout = timedelta(seconds=link.timeout_seconds)
        with _transfer_errors():
            self.store = TCPStore(link.host, link.port, is_master=False, timeout=timeout)
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore("control", self.store), rank, link.num_receivers + 1, timeout
            )
        self.link, self.rank = link, rank

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame to all receivers."""
        encoded = json.dumps(frame).encode()
        # One message for all but the longest: receivers need not be woken twice.
        head = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded[:_HEAD_BYTES]
        padded = bytearray(head.ljust(_LENGTH_BYTES + _HEAD_BYTES))
        self.broadcast(torch.frombuffer(padded, dtype=torch.uint8), SENDER)
        if len(encoded) > _HEAD_BYTES:
            rest = bytearray(encoded[_HEAD_BYTES:])
            self.broadcast(torch.frombuffer(rest, dtype=torch.uint8), SENDER)

    def receive(self) -> dict[str, Any]:
        """Receives the next frame of the sender."""
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

    def gather(self, own: str) -> list[str]:
        """The string of every receiver, in order of rank; all are of one length."""
        gathered = []
        for rank in range(1, self.link.num_receivers + 1):
            buffer = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
            self.broadcast(buffer, rank)
            gathered.append(buffer.numpy().tobytes().decode(errors="replace"))
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fills the tensor with that of rank `root`, on all ranks."""
        with _transfer_errors():
            if self._group is None:
                raise RuntimeError("the link was closed after an error")
            self._group.broadcast(tensor, root).wait()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leaves; endpoints that wait for this one get an error now."""
        self._group = None


@contextmanager
def _transfer_errors() -> Iterator[None]:
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
