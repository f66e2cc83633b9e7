"""How the bytes of a bucket get from the trainer's process into an engine's.

| transport | where the two are | copies of the bytes |
|---|---|---|
| `shared_memory` | on one machine, otherwise than below | 1 |
| `cuda_ipc` | on one GPU | 1, on the GPU |
| `gloo` | anywhere | 1 and the network |
| `nccl` | on different GPUs | 1 and the network |
"""

import mmap
import os
import pickle
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.allocator import memory_for_others
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.messages import SENDER, ControlGroup, TransportName
from nemo_rl_core.errors import ResourceError


class Transport:
    """What one endpoint moves bytes with; all else goes over the control group.

    Args:
        control: The group, which all endpoints have joined.

    Attributes:
        bucket_bytes: About how much is packed at once. By default few enough that a checksum finds
            in the processor's cache what was just packed or received.
    """

    bucket_bytes: ClassVar[int] = 16 * 1024**2

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

    def pull(self, reference: Any, num_bytes: int) -> torch.Tensor:
        """Receiver: returns `[num_bytes]` of uint8, unchanged until the transfer ends."""
        raise NotImplementedError

    def settle(self) -> None:
        """Sender: waits until all receivers have taken what was pushed."""

    def end(self) -> None:
        """Sender: all receivers have loaded everything."""


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
        """Process, file descriptor, size of the file, and the number that makes it this file."""
        segment = self._segments[self._num_used - 1]
        identity = os.fstat(segment.descriptor).st_ino
        return [os.getpid(), segment.descriptor, segment.flat.nbytes, identity]

    def pull(self, reference: list[int], num_bytes: int) -> torch.Tensor:
        """A view on the sender's pages."""
        pid, descriptor, file_bytes, identity = reference
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


class CudaIpcTransport(Transport):
    """Two buffers on one GPU that both processes map.

    A receiver copies a bucket and then says so. Meanwhile the sender packs the next one into the
    other buffer. So this holds two buckets, however large the model is, and the receiver's tensors
    are its own: vLLM keeps those of a layer until the last of them has arrived.
    """

    bucket_bytes = 64 * 1024**2

    def __init__(self, control: ControlGroup) -> None:
        _need_gpu("cuda_ipc")
        super().__init__(control)
        self._device = local_device()
        self._buffers = [self._memory(0), self._memory(0)]
        self._turn, self._is_unread = 0, False

    def _memory(self, num_bytes: int) -> torch.Tensor:
        with memory_for_others():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A view on the buffer of the bucket before the last, which receivers have copied."""
        self._turn = turn = 1 - self._turn
        if self._buffers[turn].nbytes < num_bytes:
            self._buffers[turn] = self._memory(0)  # freed before more is allocated
            self._buffers[turn] = self._memory(num_bytes)
        return self._buffers[turn][:num_bytes]

    def reference(self, payload: torch.Tensor) -> str:
        """The handle that `torch.multiprocessing` makes of a CUDA tensor."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()  # packed, before anyone looks
        _, arguments = reduce_tensor(payload)  # type: ignore[no-untyped-call]
        return pickle.dumps(arguments).hex()

    def push(self, payload: torch.Tensor) -> None:
        """The receivers have the handle."""
        self._is_unread = True

    def settle(self) -> None:
        """Waits for the receivers' copies."""
        if self._is_unread:
            self._control.gather(_COPIED)
        self._is_unread = False

    def pull(self, reference: str, num_bytes: int) -> torch.Tensor:
        """A copy of the sender's bytes."""
        payload = self._mapped(reference).clone()
        torch.cuda.current_stream(self._device).synchronize()
        self._control.gather(_COPIED)
        return payload

    def _mapped(self, reference: str) -> torch.Tensor:
        """A view on the sender's memory."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(bytes.fromhex(reference)))  # noqa: S301 - of the own trainer
        # The GPU's number here; each process may have numbers of its own.
        arguments[_DEVICE_ARGUMENT] = self._device.index
        payload: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return payload

    def end(self) -> None:
        """Gives the GPU's memory back, which the engine needs for keys and values."""
        self._buffers = [self._memory(0), self._memory(0)]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


_COPIED = "copied"
_DEVICE_ARGUMENT = 6  # of torch's `rebuild_cuda_tensor`


class GlooTransport(Transport):
    """A broadcast over the control group itself, bucket by bucket.

    The sender holds one bucket at a time, a receiver as many as its caller keeps; either uses that
    memory again.
    """

    device = torch.device("cpu")

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(control)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free: list[np.ndarray] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """The one buffer; a broadcast that has returned is done with it."""
        if self._buffer.nbytes < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:num_bytes]

    def push(self, payload: torch.Tensor) -> None:
        """All receivers take part."""
        self._broadcast(payload)

    def pull(self, reference: None, num_bytes: int) -> torch.Tensor:
        """Memory that no tensor of an earlier bucket, which callers may keep, lies in."""
        payload = self._memory(num_bytes)
        self._broadcast(payload)
        return payload

    def _memory(self, num_bytes: int) -> torch.Tensor:
        block = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if block.nbytes < num_bytes:
            block = np.empty(num_bytes, dtype=np.uint8)
        lent = block[:num_bytes]
        # The last tensor on it drops `lent`, and with that gives the block back.
        weakref.finalize(lent, self._free.append, block)
        return torch.from_numpy(lent)

    def _broadcast(self, payload: torch.Tensor) -> None:
        self._control.broadcast(payload, SENDER)


class NcclTransport(GlooTransport):
    """The same between GPUs, over a group of their own."""

    def __init__(self, control: ControlGroup) -> None:
        _need_gpu("nccl")
        super().__init__(control)
        self.device = local_device()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=control.link.timeout_seconds)
        self._group = dist.ProcessGroupNCCL(
            PrefixStore("nccl", control.store),
            control.rank,
            control.link.num_receivers + 1,
            options,
        )

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _broadcast(self, payload: torch.Tensor) -> None:
        self._group.broadcast(payload, SENDER).wait()  # type: ignore[attr-defined]


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


@dataclass(frozen=True)
class Location:
    """Where a process runs.

    Attributes:
        machine: Equal for processes that can open one another's files.
        gpu: The identity of its GPU, or None.
    """

    machine: str
    gpu: str | None


def current_location() -> Location:
    """Where this process runs."""
    gpu = None
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(local_device()).uuid)
    return Location(current_machine(), gpu)


def current_machine() -> str:
    """Host name and, because containers share one, name space of processes."""
    namespace = Path("/proc/self/ns/pid")
    shared = namespace.readlink() if namespace.exists() else "none"
    return f"{socket.gethostname()} {shared}"


def choose_transport(sender: Location, receivers: Sequence[Location]) -> TransportName:
    """The fastest transport that reaches all receivers."""
    ends = [sender, *receivers]
    on_one_machine = len({end.machine for end in ends}) == 1
    gpus = {end.gpu for end in ends}
    if None in gpus:
        return "shared_memory" if on_one_machine else "gloo"
    if len(gpus) == 1 and on_one_machine:
        return "cuda_ipc"
    if len(gpus) == len(ends):
        return "nccl"
    # NCCL refuses two ranks on one GPU.
    return "shared_memory" if on_one_machine else "gloo"
