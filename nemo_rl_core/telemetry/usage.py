"""Resource usage of this process and its workers: time, CPU seconds, tokens, FLOPs, memory.

The CPU time of a crashed worker since its last reading is lost.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl_core.telemetry.model_flops import ModelFlops, Phase

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class GpuUse:
    """The GPU of one process.

    Attributes:
        peak_gib: Peak memory reserved by torch since the last reset, including caches; for an
            engine also memory outside of torch (`engine_gpu_use`).
    """

    name: str
    memory_gib: float
    peak_gib: float


def gpu_use(
    _: Any = None, *, reset_peak: bool = False, device: "torch.device | None" = None
) -> GpuUse | None:
    """Returns the GPU use of this process, by default of torch's current device; None on a CPU.

    Imports nothing, since a process that computes has imported torch already.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    device = device or torch.cuda.current_device()
    if reset_peak:
        torch.cuda.reset_peak_memory_stats(device)
    properties = torch.cuda.get_device_properties(device)
    peak = float(torch.cuda.max_memory_reserved(device)) / 2**30
    return GpuUse(str(properties.name), float(properties.total_memory) / 2**30, peak)


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Opens NVML for the body; yields None if it is not installed or has no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError, RuntimeError):
        yield None
        return
    except Exception:  # noqa: BLE001  (NVML's own error, whose class cannot be named without it)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


@dataclass
class Spent:
    """Usage between two moments; filled when `measured` exits.

    Attributes:
        cpu_seconds: CPU time of this process, its ended children, and the workers.
        trained_tokens: Tokens of sequences that were trained on, prompts included.
        peak_gpu_gib: Peak memory of torch on a trainer's GPU since its worker started.
        processes: `store.machine.process_numerics` of the workers, by role.
    """

    cpu_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    flops: float = 0.0
    device: str = ""
    peak_gpu_gib: float = 0.0
    peak_engine_gpu_gib: float = 0.0
    processes: dict[str, dict[str, str]] = field(default_factory=dict)


_TIMEOUT_SECONDS, _LAST_TIMEOUT_SECONDS = 2.0, 30.0
"""Timeouts of readings; the last one may wait for a worker that hashes files of user code."""

_lock = threading.Lock()
_total = Spent()
_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()
_seen: dict[str, float] = {}


def count(
    phase: Phase,
    shape: ModelFlops,
    lengths: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]",
    *,
    num_generated: int = 0,
) -> None:
    """Counts work on complete sequences."""
    import numpy as np

    with _lock:
        _total.flops += shape.flops(phase, lengths)
        _total.generated_tokens += num_generated
        _total.trained_tokens += int(np.sum(lengths)) if phase == "training" else 0


def saw_gpu(gpu: GpuUse) -> None:
    """Records the GPU use of a trainer's worker."""
    with _lock:
        _total.device = gpu.name
        _total.peak_gpu_gib = max(_total.peak_gpu_gib, gpu.peak_gib)


def saw_engine_gpu(gpu: GpuUse) -> None:
    """Records the GPU use of an engine's worker."""
    with _lock:
        _total.device = _total.device or gpu.name
        _total.peak_engine_gpu_gib = max(_total.peak_engine_gpu_gib, gpu.peak_gib)


def saw_process(role: str, numerics: dict[str, str]) -> None:
    """Records settings that affect the bits of a worker's results, by role ("training")."""
    with _lock:
        _total.processes[role] = numerics


class Owner(Protocol):
    """An owner of other processes."""

    def cpu_seconds(self, timeout_seconds: float) -> Mapping[str, float]:
        """Returns CPU seconds since its start by process, without those that time out."""


def watch(owner: Owner) -> None:
    """Includes the owner's processes, until `unwatch` or until the owner is garbage collected."""
    _owners.add(owner)


def unwatch(owner: Owner) -> None:
    """Reads the owner's processes for the last time; does nothing if they are not watched."""
    if owner in _owners:
        _owners.discard(owner)
        _seen.update(owner.cpu_seconds(_LAST_TIMEOUT_SECONDS))


def cpu_seconds() -> float:
    """Returns user and system time of this process, its ended children, and all workers."""
    for owner in list(_owners):
        _seen.update(owner.cpu_seconds(_TIMEOUT_SECONDS))
    times = os.times()
    return sum(times[:4]) + sum(_seen.values())


@contextmanager
def measured() -> Iterator[Spent]:
    """Measures the usage of the body, also if it fails.

    A worker started in the body counts from its start.
    """
    spent = Spent()
    before, start = Spent(**vars(_total)), cpu_seconds()
    _total.device, _total.peak_gpu_gib, _total.peak_engine_gpu_gib = "", 0.0, 0.0
    _total.processes = {}
    try:
        yield spent
    finally:
        spent.cpu_seconds = cpu_seconds() - start
        spent.generated_tokens = _total.generated_tokens - before.generated_tokens
        spent.trained_tokens = _total.trained_tokens - before.trained_tokens
        spent.flops = _total.flops - before.flops
        spent.device, spent.peak_gpu_gib = _total.device, _total.peak_gpu_gib
        spent.peak_engine_gpu_gib = _total.peak_engine_gpu_gib
        spent.processes = dict(_total.processes)
        # These workers and GPUs count for an enclosing stage, too.
        _total.processes = {**before.processes, **_total.processes}
        _total.device = _total.device or before.device
        _total.peak_gpu_gib = max(_total.peak_gpu_gib, before.peak_gpu_gib)
        _total.peak_engine_gpu_gib = max(_total.peak_engine_gpu_gib, before.peak_engine_gpu_gib)


class Timer:
    """Sums the wall seconds of named phases.

    Example:
        >>> timer = Timer()
        >>> with timer.phase("rollout"):
        ...     pass
        >>> list(timer.take())
        ['rollout_seconds']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the body to the phase, also if it raises; nested phases count twice."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def divide(self, phase: str, part: str, seconds: float) -> None:
        """Moves seconds from one phase to another.

        Example:
            >>> timer = Timer()
            >>> with timer.phase("train"):
            ...     pass
            >>> timer.divide("train", "logprobs", 0.0)
            >>> list(timer.take())
            ['train_seconds', 'logprobs_seconds']
        """
        for name, change in ((phase, -seconds), (part, seconds)):
            self._seconds[name] = self._seconds.get(name, 0.0) + change

    def take(self) -> dict[str, float]:
        """Returns `{"<phase>_seconds": seconds}` in order of first use, and resets the timer."""
        taken = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


def peak_memory_gib(pids: Iterable[int] = ()) -> float:
    """Sums the peak resident memory of processes, in GiB; without pids, of this process.

    Reads `VmHWM` in `/proc`, since `ru_maxrss` includes the process before its exec. Shared memory
    counts in each process, so the sum is an upper bound. Ended processes count 0.
    """
    kib = (_peak_kib(pid) for pid in (tuple(pids) or (os.getpid(),)))
    return sum(kib) / 2**20


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
