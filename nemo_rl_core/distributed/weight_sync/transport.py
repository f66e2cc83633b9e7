"""How the bytes of a bucket get from a trainer's process into an engine's.

| transport | where the two are | copies of the bytes | held at the sender |
|---|---|---|---|
| `shared_memory` | on one machine, otherwise than below | 1 | all |
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

from nemo_rl_core.distributed.allocator import memory_for_others
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.messages import SENDER, ControlGroup
from nemo_rl_core.errors import ResourceError
from nemo_rl_core.planning.routes import GPU_BUCKET_BYTES, TransportName


class Transport:
    """What one endpoint moves bytes with; all else goes over the control group.

    Args:
        control: The group, which all endpoints have joined.

    Attributes:
        bucket_bytes: About how much is packed at once. By default few enough that a checksum finds
            in the processor's cache what was just packed or received.
        splits_tensors: Whether a tensor larger than that comes in pieces: where a receiver copies
            the bytes anyway.
    """

    bucket_bytes: ClassVar[int] = 16 * 1024**2
    splits_tensors: ClassVar[bool] = False

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def begin(self) -> None:
        """Starts a transfer; all receivers are done with the one before."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Sender: returns `[num_bytes]` of uint8 to pack the next bucket into."""
        raise NotImplementedError

    def reference(self, payload: torch.Tensor) -> Any:
        """Sender: returns, for JSON, where receivers find the bytes that were packed last."""
        return None

    def push(self, payload: torch.Tensor) -> None:
        """Sender: moves the bytes, where receivers do not read them in place."""

    def own_memory(self, num_bytes: int) -> torch.Tensor | None:
        """Receiver: returns `[num_bytes]` of uint8 to pull into; None where none is needed."""
        return None

    def pull(self, reference: Any, out: Any) -> torch.Tensor:
        """Receiver: returns the bytes of a bucket, unchanged until the transfer ends.

        Args:
            reference: As the sender's `reference` made it.
            out: A part of `own_memory`, of the bucket's size.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Sender: waits until all receivers have taken what was pushed."""

    def end(self) -> None:
        """Sender: all receivers have loaded everything."""

    def close(self) -> None:
        """The transfer has failed, and there is no other."""


class SharedMemoryTransport(Transport):
    """Pages of anonymous files that both processes map.

    They have no name, so that nothing is left behind, however a process ends. Both ends keep them
    for the next transfer: the system needs ten times as long to allocate a page as a copy takes to
    fill it.
    """

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._segments: list[_Segment] = []
        self._num_used = 0
        self._mapped: dict[int, torch.Tensor] = {}
        self._mapped_before: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Pages may be filled again, in the same order; a receiver unmaps unused ones."""
        self._num_used = 0
        self._mapped, self._mapped_before = {}, self._mapped

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A view on the next pages; those that are too few make way for more."""
        index, self._num_used = self._num_used, self._num_used + 1
        if index == len(self._segments):
            self._segments.append(_Segment(num_bytes))
        elif self._segments[index].flat.nbytes < num_bytes:
            self._segments[index] = _Segment(num_bytes)
        return self._segments[index].flat[:num_bytes]

    def reference(self, payload: torch.Tensor) -> list[int]:
        """Process, file descriptor, sizes of bucket and file, and what makes it this file."""
        segment = self._segments[self._num_used - 1]
        identity = os.fstat(segment.descriptor).st_ino
        return [os.getpid(), segment.descriptor, payload.nbytes, segment.flat.nbytes, identity]

    def pull(self, reference: list[int], out: None) -> torch.Tensor:
        """A view on the sender's pages."""
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
    """Two buffers at the sender, and memory of a receiver's own for what arrives.

    While receivers take the bytes of one buffer, the sender packs the next bucket into the other.
    Tensors larger than a bucket come in pieces, so that the sender holds two buckets, however large
    the model and its embedding are.
    """

    splits_tensors = True

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._buffers = [self._memory(0), self._memory(0)]
        self._turn = 0

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` of uint8 for a buffer."""
        raise NotImplementedError

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A view on the buffer of the bucket before the last, which receivers have taken."""
        self._turn = turn = 1 - self._turn
        if self._buffers[turn].nbytes < num_bytes:
            self._buffers[turn] = self._memory(0)  # freed before more is allocated
            self._buffers[turn] = self._memory(num_bytes)
        return self._buffers[turn][:num_bytes]

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Receiver: as for a buffer."""
        return self._memory(num_bytes)


class CudaIpcTransport(BufferedTransport):
    """Buffers on one GPU that both processes map.

    A receiver copies a bucket and then says so. Its tensors are its own: vLLM keeps those of a
    layer until the last of them has arrived.
    """

    bucket_bytes = GPU_BUCKET_BYTES

    def __init__(self, control: ControlGroup) -> None:
        _need_gpu("cuda_ipc")
        self._device = local_device()
        self._is_unread = False
        super().__init__(control)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with memory_for_others():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def reference(self, payload: torch.Tensor) -> dict[str, Any]:
        """Returns the handle of a CUDA tensor by `torch.multiprocessing`, as plain values."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()  # packed, before anyone looks
        rebuild, arguments = reduce_tensor(payload)  # type: ignore[no-untyped-call]
        named = zip(inspect.signature(rebuild).parameters, arguments, strict=True)
        return {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in named
            if name not in (*_CONSTANT, "storage_device")
        }

    def push(self, payload: torch.Tensor) -> None:
        """The receivers have the handle."""
        self._is_unread = True

    def settle(self) -> None:
        """Waits for the receivers' copies."""
        if self._is_unread:
            self._control.gather(_COPIED)
        self._is_unread = False

    def pull(self, reference: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        """A copy of the sender's bytes."""
        out.copy_(self._mapped(reference))
        torch.cuda.current_stream(self._device).synchronize()
        self._control.gather(_COPIED)
        return out

    def _mapped(self, reference: dict[str, Any]) -> torch.Tensor:
        """A view on the sender's memory."""
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
        """Gives the GPU's memory back, which the engine needs for keys and values."""
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
    """A broadcast of every bucket, which goes on while the sender packs the next one."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._wait: Callable[[], None] | None = None

    def push(self, payload: torch.Tensor) -> None:
        """All receivers take part."""
        self._wait = self._broadcast(payload)

    def settle(self) -> None:
        """Waits for the broadcast."""
        if self._wait is not None:
            self._wait()
        self._wait = None

    def pull(self, reference: None, out: torch.Tensor) -> torch.Tensor:
        """What the sender broadcasts."""
        self._broadcast(out)()
        return out

    def _broadcast(self, payload: torch.Tensor) -> Callable[[], None]:
        """Starts it; the function that is returned waits for its end."""
        raise NotImplementedError


class GlooTransport(BroadcastTransport):
    """Over the control group itself; a receiver uses memory again that its caller has left."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._free: list[np.ndarray] = []

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory that no tensor of an earlier bucket, which callers may keep, lies in."""
        block = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if block.nbytes < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        lent = block[:num_bytes]
        # The last tensor on it drops `lent`, and with that gives the block back.
        weakref.finalize(lent, self._free.append, block)
        return torch.from_numpy(lent)

    def _broadcast(self, payload: torch.Tensor) -> Callable[[], None]:
        return self._control.start_broadcast(payload, SENDER)


class NcclTransport(BroadcastTransport):
    """Between GPUs, over a group of their own."""

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
            work.wait()  # the stream waits, this thread does not

        return wait

    def end(self) -> None:
        """Gives the buffers back, which the trainer needs for activations."""
        self._buffers = [self._memory(0), self._memory(0)]

    def close(self) -> None:
        """Ends a broadcast that a lost receiver will not join, which would hold up the GPU."""
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
            f"weights cannot travel by {name!r}: this process sees no GPU",
            fix="use 'shared_memory' on one machine, or 'gloo'",
        )
