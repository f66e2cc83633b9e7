"""How the bytes of a bucket get from the trainer's process into an engine's.

| carrier | where the two are | copies of the bytes |
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
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.channel import SENDER, CarrierName, Channel
from nemo_rl_core.errors import ResourceError


class Carrier(Protocol):
    """One end of a way for bytes; what is not said is said on the channel."""

    def begin(self) -> None:
        """A transfer begins, and all receivers are done with the one before."""
        ...

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Sender: `[num_bytes]` of uint8 to pack the next bucket into."""
        ...

    def reference(self, payload: torch.Tensor) -> Any:
        """Sender: where receivers find what lies in the buffer, as JSON can say it."""
        ...

    def push(self, payload: torch.Tensor) -> None:
        """Sender: moves the bytes, where receivers do not come for them."""
        ...

    def pull(self, reference: Any, num_bytes: int) -> torch.Tensor:
        """Receiver: `[num_bytes]` of uint8, unchanged until the transfer ends."""
        ...


class SharedMemoryCarrier:
    """Pages of anonymous files that both processes map.

    They have no name, so that nothing is left behind, however a process ends. Both ends keep them
    for the next transfer: the system needs ten times as long to hand out a fresh page as a copy
    takes to fill it.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._num_used = 0
        self._mapped: dict[int, torch.Tensor] = {}
        self._mapped_before: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """The segments may be filled again, in the same order; what is no longer used, goes."""
        self._num_used = 0
        self._mapped, self._mapped_before = {}, self._mapped

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """A view on the next segment; one that is too small makes way for a larger one."""
        place, self._num_used = self._num_used, self._num_used + 1
        if place == len(self._segments):
            self._segments.append(_Segment(num_bytes))
        elif self._segments[place].num_bytes < num_bytes:
            self._segments[place] = _Segment(num_bytes)
        return self._segments[place].flat[:num_bytes]

    def reference(self, payload: torch.Tensor) -> list[int]:
        """Process, file descriptor, size of the file, and the number that makes it this file."""
        segment = self._segments[self._num_used - 1]
        identity = os.fstat(segment.descriptor).st_ino
        return [os.getpid(), segment.descriptor, segment.num_bytes, identity]

    def push(self, payload: torch.Tensor) -> None:
        """Nothing to do: the bytes are there."""

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
        self.num_bytes = max(num_bytes, 1)
        self.descriptor = os.memfd_create("weights")
        os.ftruncate(self.descriptor, self.num_bytes)
        pages = mmap.mmap(self.descriptor, self.num_bytes)
        self.flat = torch.frombuffer(pages, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)


class GlooCarrier:
    """A broadcast over the channel itself, bucket by bucket.

    The sender holds one bucket at a time, a receiver as many as its caller keeps; either uses that
    memory again.
    """

    device = torch.device("cpu")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free: list[np.ndarray] = []

    def begin(self) -> None:
        """Nothing to do."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """The one buffer; a broadcast that has returned is done with it."""
        if self._buffer.nbytes < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:num_bytes]

    def reference(self, payload: torch.Tensor) -> None:
        """Receivers need none."""

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
        self._channel.broadcast(payload, SENDER)


class NcclCarrier(GlooCarrier):
    """The same between GPUs, over a group of their own."""

    def __init__(self, channel: Channel) -> None:
        _need_gpu("nccl")
        super().__init__(channel)
        self.device = local_device()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=channel.route.timeout_seconds)
        self._group = dist.ProcessGroupNCCL(
            PrefixStore("nccl", channel.store),
            channel.rank,
            channel.route.num_receivers + 1,
            options,
        )

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _broadcast(self, payload: torch.Tensor) -> None:
        self._group.broadcast(payload, SENDER).wait()  # type: ignore[attr-defined]


class CudaIpcCarrier:
    """Memory of one GPU that both processes map; kept for the next transfer as pages are."""

    def __init__(self) -> None:
        _need_gpu("cuda_ipc")
        self._device = local_device()
        self._buffers: list[torch.Tensor] = []
        self._num_used = 0

    def begin(self) -> None:
        """The buffers may be filled again, in the same order."""
        self._num_used = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """A view on the next buffer; one that is too small makes way for a larger one."""
        place, self._num_used = self._num_used, self._num_used + 1
        if place == len(self._buffers):
            self._buffers.append(self._fresh(num_bytes))
        elif self._buffers[place].nbytes < num_bytes:
            self._buffers[place] = self._fresh(num_bytes)
        return self._buffers[place][:num_bytes]

    def _fresh(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def reference(self, payload: torch.Tensor) -> str:
        """What `torch.multiprocessing` hands over for a CUDA tensor."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()  # packed, before anyone looks
        _, arguments = reduce_tensor(payload)  # type: ignore[no-untyped-call]
        return pickle.dumps(arguments).hex()

    def push(self, payload: torch.Tensor) -> None:
        """Nothing to do: the bytes are there."""

    def pull(self, reference: str, num_bytes: int) -> torch.Tensor:
        """A view on the sender's memory."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(bytes.fromhex(reference)))  # noqa: S301 - of the own trainer
        # The GPU's number here; Ray gives each process numbers of its own.
        arguments[_DEVICE_ARGUMENT] = self._device.index
        payload: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return payload


_DEVICE_ARGUMENT = 6  # of torch's `rebuild_cuda_tensor`


def _need_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise ResourceError(
            f"weights cannot travel by {name!r}: this process sees no GPU",
            fix="use 'shared_memory' on one machine, or 'gloo'",
        )


def make_carrier(channel: Channel) -> Carrier:
    """This end of the way that the route names."""
    match channel.route.carrier:
        case "shared_memory":
            return SharedMemoryCarrier()
        case "cuda_ipc":
            return CudaIpcCarrier()
        case "gloo":
            return GlooCarrier(channel)
        case "nccl":
            return NcclCarrier(channel)


@dataclass(frozen=True)
class Location:
    """Where a process runs.

    Attributes:
        machine: Equal for processes that can open one another's files.
        gpu: The identity of its GPU, or None.
    """

    machine: str
    gpu: str | None


def location_of_this_process() -> Location:
    """Where what runs here can be reached from."""
    gpu = None
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(local_device()).uuid)
    return Location(machine_of_this_process(), gpu)


def machine_of_this_process() -> str:
    """Host name and, because containers share one, name space of processes."""
    namespace = Path("/proc/self/ns/pid")
    shared = namespace.readlink() if namespace.exists() else "none"
    return f"{socket.gethostname()} {shared}"


def carrier_between(sender: Location, receivers: Sequence[Location]) -> CarrierName:
    """The fastest way that reaches all receivers."""
    places = [sender, *receivers]
    on_one_machine = len({place.machine for place in places}) == 1
    gpus = {place.gpu for place in places}
    if None in gpus:
        return "shared_memory" if on_one_machine else "gloo"
    if len(gpus) == 1 and on_one_machine:
        return "cuda_ipc"
    if len(gpus) == len(places):
        return "nccl"
    # It refuses two ranks on one GPU.
    return "shared_memory" if on_one_machine else "gloo"
