"""Transports between simulated GPUs of real processes: shared memory, and NCCL.

The buffers of CUDA IPC are in anonymous files of the host; NCCL is gloo on the numbers of the
tensors. Everything else is the code that runs on GPUs. Within `simulated_cuda`, tensors report
`cuda:0`; outside it they are CPU tensors.
"""

import mmap
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from nemo_rl_core.distributed.weight_sync import transport as transport_module
from nemo_rl_core.distributed.weight_sync.transport import (
    CudaIpcTransport,
    NcclTransport,
    _Segment,
)
from tests.simulated_cuda import SimulatedTensor


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return SimulatedTensor(tensor) if torch.cuda.is_available() else tensor


class SimulatedIpc(CudaIpcTransport):
    """`CudaIpcTransport` over host memory.

    Attributes:
        most_bytes: Peak size of all buffers that exist at the same time.
        mapped_from: Ids of processes whose memory this one has mapped.
    """

    most_bytes = 0
    mapped_from: ClassVar[set[int]] = set()
    _live: list[Any]

    def _memory(self, num_bytes: int) -> torch.Tensor:
        segment = _Segment(num_bytes)
        self.__dict__.setdefault("_live", []).append(weakref.ref(segment))
        self.__dict__.setdefault("_segments", {})[segment.flat.data_ptr()] = segment
        in_use = {buffer.data_ptr() for buffer in getattr(self, "_buffers", [])}
        in_use.add(segment.flat.data_ptr())
        self._segments = {key: each for key, each in self._segments.items() if key in in_use}
        # The smallest size of a file is one byte.
        num_live = sum(each().flat.nbytes & ~1 for each in self._live if each() is not None)
        self.most_bytes = max(self.most_bytes, num_live)
        return _on_gpu(segment.flat)[:num_bytes]

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def reference(self, payload: torch.Tensor) -> Any:
        segment = self._segments[payload.data_ptr()]
        return [os.getpid(), segment.descriptor, payload.nbytes]

    def _mapped(self, reference: Any) -> torch.Tensor:
        pid, descriptor, num_bytes = reference
        self.mapped_from.add(pid)
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
            pages = mmap.mmap(file.fileno(), num_bytes)
        return _on_gpu(torch.frombuffer(pages, dtype=torch.uint8))


class _GlooBetweenGpus:
    """Methods of the group that `NcclTransport` uses."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.is_aborted = False

    def broadcast(self, payload: torch.Tensor, root: int) -> Any:
        values = payload.values if isinstance(payload, SimulatedTensor) else payload
        return self._group.broadcast(values, root)

    def abort(self) -> None:
        self.is_aborted = True


class SimulatedNccl(NcclTransport):
    """`NcclTransport` over a gloo group.

    Attributes:
        most_bytes: Peak size of both buffers.
    """

    most_bytes = 0

    def _join(self, store: Any) -> Any:
        size = self._control.link.num_receivers + 1
        return _GlooBetweenGpus(ProcessGroupGloo(store, self._control.rank, size))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        payload = super().allocate(num_bytes)
        self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in self._buffers))
        return payload


def simulate_transports(patch: pytest.MonkeyPatch) -> None:
    """Lets endpoints of this process use the simulated transports without a GPU."""
    patch.setattr(transport_module, "_need_gpu", lambda name: None)
    patch.setitem(transport_module.TRANSPORTS, "cuda_ipc", SimulatedIpc)
    patch.setitem(transport_module.TRANSPORTS, "nccl", SimulatedNccl)
    if not torch.cuda.is_available():
        stream = SimpleNamespace(synchronize=lambda: None)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        for name in ("ipc_collect", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda: None)
