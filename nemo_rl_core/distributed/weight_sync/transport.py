"""Transports of a bucket's bytes from a trainer's process to an engine's, and their control group.

The control group is a gloo process group, separate from those of the trainer's and the engine's
ranks: rank 0 is the trainer's rank that sends, the others are engine workers. A process that dies
closes its connections, so its peers get an error at once; a stuck process runs into the timeout.

| transport | sender and receiver are | copies of the bytes | memory of the sender |
|---|---|---|---|
| `shared_memory` | on one machine, unless `cuda_ipc` or `nccl` applies | 1 | all weights |
| `cuda_ipc` | on one GPU | 2, on the GPU | two buckets |
| `gloo` | anywhere | 1 and the network | two buckets |
| `nccl` | on different GPUs | 1 and the network | two buckets |
"""

import hmac
import inspect
import json
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

from nemo_rl_core.distributed.allocator import shareable_memory
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.routes import GPU_BUCKET_BYTES, TransportName
from nemo_rl_core.errors import ResourceError, TransferError

SENDER = 0
"""The sender's rank in the group; receivers follow."""
_HEAD_BYTES = 8 * 1024
_LENGTH_BYTES = 8
_SIGNATURE_BYTES = 32


@dataclass(frozen=True)
class LinkSpec:
    """Parameters with which both ends of a link connect.

    Attributes:
        host: Address of a `TCPStore`, which listens while endpoints may join.
        timeout_seconds: How long an endpoint waits for the others.
        token: Secret of both ends, passed through Ray. It signs all messages, since every user of
            the machines can connect to the store and to gloo.
        sender: Rank of the trainer that sends. Each sender has a separate link at the same store.
    """

    host: str
    port: int
    num_receivers: int
    transport: TransportName
    timeout_seconds: float
    token: str = field(repr=False)
    sender: int = 0


class ControlGroup:
    """One endpoint's membership in the group; waits until all have joined.

    Args:
        rank: `SENDER`, or the receiver's index, starting at 1.

    Raises:
        TransferError: If the others do not join in time; in any method, if one of them is gone.
    """

    def __init__(self, link: LinkSpec, rank: int) -> None:
        timeout = timedelta(seconds=link.timeout_seconds)
        with transfer_errors():
            store = TCPStore(link.host, link.port, is_master=False, timeout=timeout)
            self.store = PrefixStore(f"sender {link.sender}", store)
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore("control", self.store), rank, link.num_receivers + 1, timeout
            )
        self.link, self.rank = link, rank
        self._num_messages = 0

    def broadcast(self, root: int, message: Any = None) -> Any:
        """Returns the message of rank `root`, as JSON, on all ranks."""
        self._num_messages += 1
        packed = b""
        if self.rank == root:
            encoded = json.dumps(message).encode()
            packed = self._signature(root, encoded) + encoded
            packed = (_LENGTH_BYTES + len(packed)).to_bytes(_LENGTH_BYTES, "big") + packed
        # One broadcast for most messages, so that receivers wake up only once.
        received, num_bytes = b"", _HEAD_BYTES
        while len(received) < num_bytes:
            part = packed[len(received) : num_bytes].ljust(num_bytes - len(received))
            buffer = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            with transfer_errors():
                self.start_broadcast(buffer, root).wait()
            received += buffer.numpy().tobytes()
            length = int.from_bytes(received[:_LENGTH_BYTES], "big")
            num_bytes = max(length, _HEAD_BYTES)
        signed = received[_LENGTH_BYTES:length]
        signature, encoded = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(root, encoded)):
            raise TransferError(
                "a message of a weight transfer is not from this run",
                expected="a signature with the token of the link",
                got=f"a wrong signature, in a message as rank {root}",
                fix="find out who connects to the ports of this run; then run the same command "
                "again: it resumes from the last save",
            )
        return json.loads(encoded)

    def _signature(self, rank: int, encoded: bytes) -> bytes:
        """Returns the signature of the current message; the count refuses repeated messages."""
        context = f"{self.link.sender} {rank} {self._num_messages} ".encode()
        return hmac.digest(self.link.token.encode(), context + encoded, "sha256")

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all receivers in rank order."""
        return [self.broadcast(rank, text) for rank in range(1, self.link.num_receivers + 1)]

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Starts to fill the tensor on all ranks with that of rank `root`, without a signature."""
        if self._group is None:
            raise RuntimeError("the link was closed after an error")
        work: Work = self._group.broadcast(tensor, root)  # type: ignore[attr-defined]
        return work

    def close(self) -> None:
        """Leaves the group; endpoints that wait for this one get an error."""
        self._group = None


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Turns errors of gloo and of the store into a `TransferError`."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(
            "a weight transfer was interrupted",
            expected="trainer and engine workers at both ends",
            got=str(error).splitlines()[0],
            fix="run the same command again: it resumes from the last save; look above for the "
            "first error of a worker",
        ) from error


class Transport:
    """Moves the bytes of one endpoint; everything else goes over the control group.

    Attributes:
        bucket_bytes: Approximate size of a bucket. By default it is small enough that bytes are
            still in the CPU cache when their checksum is computed.
        splits_tensors: Whether larger tensors are sent in pieces, which needs a receiver that
            copies the bytes.
    """

    bucket_bytes: ClassVar[int] = 16 * 1024**2
    splits_tensors: ClassVar[bool] = False

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Sender: returns `[num_bytes]` of uint8 to pack the next bucket into."""
        raise NotImplementedError

    def send(self, frame: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Sender: sends a message to all receivers, and moves the bytes of the bucket in it.

        Returns when all receivers have read the bytes of the previous bucket.
        """
        raise NotImplementedError

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Receiver: returns `[num_bytes]` of uint8 for a tensor that arrives in pieces."""
        raise NotImplementedError

    def pull(self, frame: dict[str, Any], out: torch.Tensor | None) -> torch.Tensor:
        """Receiver: returns the bytes of a bucket, unchanged until the transfer ends.

        Args:
            out: Memory for them if they are a piece of a tensor.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Sender: ends a transfer; all receivers have loaded everything."""

    def close(self) -> None:
        """Frees resources after a failed transfer; no other transfer follows."""


class SharedMemoryTransport(Transport):
    """Pages of anonymous files that both processes map.

    The files have no name, so nothing is left over, however a process ends. Both ends keep the
    pages for the next transfer: allocating a page takes ten times as long as filling it.
    """

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._segments: list[_Segment] = []
        self._num_used = 0
        self._mapped: dict[int, tuple[int, torch.Tensor]] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns a view of the next pages, which are replaced if they are too small."""
        index, self._num_used = self._num_used, self._num_used + 1
        if index == len(self._segments):
            self._segments.append(_Segment(num_bytes))
        elif self._segments[index].flat.nbytes < num_bytes:
            self._segments[index] = _Segment(num_bytes)
        return self._segments[index].flat[:num_bytes]

    def send(self, frame: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Sends a message with the process and file of the bytes, which receivers read there."""
        if payload is not None:
            index = self._num_used - 1
            segment = self._segments[index]
            file = [segment.descriptor, segment.flat.nbytes, os.fstat(segment.descriptor).st_ino]
            frame = {**frame, "segment": [index, os.getpid(), *file]}
        self._control.broadcast(SENDER, frame)

    def pull(self, frame: dict[str, Any], out: torch.Tensor | None) -> torch.Tensor:
        """Returns a view of the sender's pages."""
        index, pid, descriptor, file_bytes, inode = frame["segment"]
        if index not in self._mapped or self._mapped[index][0] != inode:
            with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
                pages = torch.frombuffer(mmap.mmap(file.fileno(), file_bytes), dtype=torch.uint8)
            self._mapped[index] = inode, pages
        return self._mapped[index][1][: frame["num_bytes"]]

    def end(self) -> None:
        """Reuses the pages in the same order."""
        self._num_used = 0


class _Segment:
    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("weights")
        os.ftruncate(self.descriptor, max(num_bytes, 1))
        pages = mmap.mmap(self.descriptor, max(num_bytes, 1))
        self.flat = torch.frombuffer(pages, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)


class BufferedTransport(Transport):
    """Two buffers at the sender, and separate memory at each receiver.

    While receivers read one buffer, the sender packs the next bucket into the other. Tensors larger
    than a bucket are sent in pieces, so the sender never needs more than two buckets.
    """

    splits_tensors = True

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._buffers = [self._memory(0), self._memory(0)]
        self._turn = 0

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """Returns `[num_bytes]` of uint8 for a buffer."""
        raise NotImplementedError

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns a view of the buffer of the bucket before last, which receivers have read."""
        self._turn = turn = 1 - self._turn
        if self._buffers[turn].nbytes < num_bytes:
            self._buffers[turn] = self._memory(0)  # freed before more is allocated
            self._buffers[turn] = self._memory(num_bytes)
        return self._buffers[turn][:num_bytes]

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns memory like that of a buffer."""
        return self._memory(num_bytes)

    def pull(self, frame: dict[str, Any], out: torch.Tensor | None) -> torch.Tensor:
        """Returns a copy of the bytes."""
        out = self.own_memory(frame["num_bytes"]) if out is None else out
        self._fill(out, frame)
        return out

    def _fill(self, out: torch.Tensor, frame: dict[str, Any]) -> None:
        raise NotImplementedError


class CudaIpcTransport(BufferedTransport):
    """Buffers on one GPU that both processes map.

    A receiver copies a bucket and then confirms it. It needs copies, because vLLM keeps the tensors
    of a layer until the last of them has arrived.
    """

    bucket_bytes = GPU_BUCKET_BYTES

    def __init__(self, control: ControlGroup) -> None:
        _need_gpu("cuda_ipc")
        self._device = local_device()
        self._is_unread = False
        super().__init__(control)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with shareable_memory():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def reference(self, payload: torch.Tensor) -> dict[str, Any]:
        """Returns the handle of a CUDA tensor by `torch.multiprocessing`, as plain values."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()  # finish packing first
        rebuild, arguments = reduce_tensor(payload)  # type: ignore[no-untyped-call]
        named_arguments = zip(inspect.signature(rebuild).parameters, arguments, strict=True)
        return {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in named_arguments
            if name not in (*_CONSTANT, "storage_device")
        }

    def send(self, frame: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Sends a message with the handle of the bytes, which receivers copy."""
        if payload is not None:
            frame = {**frame, "reference": self.reference(payload)}
        if self._is_unread:
            self._control.gather(_COPIED)
        self._control.broadcast(SENDER, frame)
        self._is_unread = payload is not None

    def _fill(self, out: torch.Tensor, frame: dict[str, Any]) -> None:
        out.copy_(self._mapped(frame["reference"]))
        torch.cuda.current_stream(self._device).synchronize()
        self._control.gather(_COPIED)

    def _mapped(self, reference: dict[str, Any]) -> torch.Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        values = {
            name: bytes.fromhex(value) if isinstance(value, str) else value
            for name, value in reference.items()
        }
        payload: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            **_CONSTANT,
            **values,
            storage_device=self._device.index,  # each process may number the GPUs differently
        )
        return payload

    def end(self) -> None:
        """Frees GPU memory that the engine needs for the KV cache."""
        self._buffers = [self._memory(0), self._memory(0)]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


_COPIED = "copied"
_CONSTANT: dict[str, Any] = {
    "tensor_cls": torch.Tensor,
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "requires_grad": False,
}
"""Arguments of torch's `rebuild_cuda_tensor` that are equal for all buckets."""


class BroadcastTransport(BufferedTransport):
    """Broadcasts every bucket while the sender packs the next one."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._moving: Work | None = None

    def send(self, frame: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Sends a message and starts to broadcast the bytes to all receivers."""
        if self._moving is not None:
            self._wait(self._moving)
        self._control.broadcast(SENDER, frame)
        self._moving = None if payload is None else self._start(payload)

    def _fill(self, out: torch.Tensor, frame: dict[str, Any]) -> None:
        self._wait(self._start(out))

    def _start(self, payload: torch.Tensor) -> Work:
        """Starts the broadcast of a bucket."""
        raise NotImplementedError

    def _wait(self, moving: Work) -> None:
        moving.wait()  # on a GPU, the stream waits, not this thread


class GlooTransport(BroadcastTransport):
    """Broadcasts over the control group; a receiver reuses memory that its caller has freed."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._free: list[np.ndarray] = []

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns memory that no tensor of an earlier bucket uses, as callers may keep tensors."""
        block = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if block.nbytes < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        lent = block[:num_bytes]
        # When the last tensor on it is freed, `lent` is too, which returns the block.
        weakref.finalize(lent, self._free.append, block)
        return torch.from_numpy(lent)

    def _start(self, payload: torch.Tensor) -> Work:
        with transfer_errors():
            return self._control.start_broadcast(payload, SENDER)

    def _wait(self, moving: Work) -> None:
        with transfer_errors():
            moving.wait()


class NcclTransport(BroadcastTransport):
    """Broadcasts between GPUs, over a separate NCCL group."""

    bucket_bytes = GPU_BUCKET_BYTES

    def __init__(self, control: ControlGroup) -> None:
        _need_gpu("nccl")
        self._device = local_device()
        super().__init__(control)
        self._group = self._join(PrefixStore("nccl", control.store))

    def _join(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._control.link.timeout_seconds)
        size = self._control.link.num_receivers + 1
        return dist.ProcessGroupNCCL(store, self._control.rank, size, options)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _start(self, payload: torch.Tensor) -> Work:
        work: Work = self._group.broadcast(payload, SENDER)
        return work

    def end(self) -> None:
        """Frees the buffers, whose memory the trainer needs for activations."""
        self._buffers = [self._memory(0), self._memory(0)]

    def close(self) -> None:
        """Aborts a broadcast that a lost receiver will not join, which would block the GPU."""
        self._group.abort()


TRANSPORTS: dict[TransportName, type[Transport]] = {
    "shared_memory": SharedMemoryTransport,
    "cuda_ipc": CudaIpcTransport,
    "gloo": GlooTransport,
    "nccl": NcclTransport,
}


def _need_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise ResourceError(
            f"weights cannot be sent by {name!r}: this process sees no GPU",
            fix="use 'shared_memory' on one machine, or 'gloo'",
        )
