"""Transports of a bucket's bytes from a trainer's process to an engine's.

| transport | sender and receiver are | copies of the bytes | memory of the sender |
|---|---|---|---|
| `shared_memory` | on one machine, unless `cuda_ipc` or `nccl` applies | 1 | all weights |
| `cuda_ipc` | on one GPU | 2, on the GPU | two buckets |
| `gloo` | anywhere | 1 and the network | two buckets |
| `nccl` | on different GPUs | 1 and the network | two buckets |
"""

import inspect
import mmap
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.allocator import shareable_memory
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.messages import SENDER, ControlGroup
from nemo_rl_core.distributed.weight_sync.routes import GPU_BUCKET_BYTES, TransportName
from nemo_rl_core.errors import ResourceError


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

    def begin(self) -> None:
        """Starts a transfer; all receivers are done with the previous one."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Sender: returns `[num_bytes]` of uint8 to pack the next bucket into."""
        raise NotImplementedError

    def reference(self, payload: torch.Tensor) -> Any:
        """Sender: returns a JSON reference by which receivers find the last packed bytes."""
        return None

    def push(self, payload: torch.Tensor) -> None:
        """Sender: moves the bytes, unless receivers read them in the sender's memory."""

    def own_memory(self, num_bytes: int) -> torch.Tensor | None:
        """Receiver: returns `[num_bytes]` of uint8 to pull into; None if not needed."""
        return None

    def pull(self, reference: Any, out: Any) -> torch.Tensor:
        """Receiver: returns the bytes of a bucket, unchanged until the transfer ends."""
        raise NotImplementedError

    def settle(self) -> None:
        """Sender: waits until all receivers have read the pushed bytes."""

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
        self._mapped: dict[int, torch.Tensor] = {}
        self._mapped_before: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Reuses the pages in the same order; a receiver unmaps unused ones."""
        self._num_used = 0
        self._mapped, self._mapped_before = {}, self._mapped

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns a view of the next pages, which are replaced if they are too small."""
        index, self._num_used = self._num_used, self._num_used + 1
        if index == len(self._segments):
            self._segments.append(_Segment(num_bytes))
        elif self._segments[index].flat.nbytes < num_bytes:
            self._segments[index] = _Segment(num_bytes)
        return self._segments[index].flat[:num_bytes]

    def reference(self, payload: torch.Tensor) -> list[int]:
        """Returns process, file descriptor, sizes of bucket and file, and the file's inode."""
        segment = self._segments[self._num_used - 1]
        identity = os.fstat(segment.descriptor).st_ino
        return [os.getpid(), segment.descriptor, payload.nbytes, segment.flat.nbytes, identity]

    def pull(self, reference: list[int], out: None) -> torch.Tensor:
        """Returns a view of the sender's pages."""
        pid, descriptor, num_bytes, file_bytes, identity = reference
        pages = self._mapped_before.get(identity)
        if pages is None:
            with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
                pages = torch.frombuffer(mmap.mmap(file.fileno(), file_bytes), dtype=torch.uint8)
        self._mapped[identity] = pages
        return pages[:num_bytes]


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
        """Receiver: returns memory like that of a buffer."""
        return self._memory(num_bytes)


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

    def push(self, payload: torch.Tensor) -> None:
        """Marks the buffer as unread; the receivers have the handle."""
        self._is_unread = True

    def settle(self) -> None:
        """Waits for the receivers' copies."""
        if self._is_unread:
            self._control.gather(_COPIED)
        self._is_unread = False

    def pull(self, reference: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the sender's bytes."""
        out.copy_(self._mapped(reference))
        torch.cuda.current_stream(self._device).synchronize()
        self._control.gather(_COPIED)
        return out

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
        self._wait: Callable[[], None] | None = None

    def push(self, payload: torch.Tensor) -> None:
        """Starts a broadcast to all receivers."""
        self._wait = self._broadcast(payload)

    def settle(self) -> None:
        """Waits for the broadcast."""
        if self._wait is not None:
            self._wait()
        self._wait = None

    def pull(self, reference: None, out: torch.Tensor) -> torch.Tensor:
        """Receives the sender's broadcast."""
        self._broadcast(out)()
        return out

    def _broadcast(self, payload: torch.Tensor) -> Callable[[], None]:
        raise NotImplementedError


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

    def _broadcast(self, payload: torch.Tensor) -> Callable[[], None]:
        return self._control.start_broadcast(payload, SENDER)


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

    def _broadcast(self, payload: torch.Tensor) -> Callable[[], None]:
        work = self._group.broadcast(payload, SENDER)

        def wait() -> None:
            work.wait()  # the stream waits, not this thread

        return wait

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
