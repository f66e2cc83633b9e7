"""Resource usage of this process and its workers: CPU seconds, tokens, FLOPs.

Callers of a model count tokens by `count`, and owners of other processes register by `watch` to
report CPU time. A stage records the difference over its work (`Spent`). The CPU time of a worker
that dies is lost since the last reading.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl_core.telemetry.gpu_use import GpuUse
from nemo_rl_core.telemetry.model_flops import ModelFlops, Phase

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Spent:
    """Usage between two moments; filled when `measured` exits.

    Attributes:
        cpu_seconds: CPU time of this process, its ended children, and the workers.
        generated_tokens: Tokens sampled by engines.
        trained_tokens: Tokens of sequences that were trained on, prompts included.
        flops: See `nemo_rl_core.telemetry.model_flops`.
        device: The kind of GPU of the workers; empty without any.
        peak_gpu_gib: The most that torch has held of a trainer's GPU, since its worker started.
        peak_engine_gpu_gib: The most that a worker of an engine has held of its GPU.
        processes: `store.machine.process_numerics` of the workers, by what they did.
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
"""The last reading may wait for a worker that hashes files which its user code has read."""

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
    """Counts work on complete sequences.

    Args:
        phase: The kind of work.
        shape: Sizes of the model.
        lengths: Tokens of each sequence, prompt and completion.
        num_generated: Number of sampled tokens.
    """
    import numpy as np

    with _lock:
        _total.flops += shape.flops(phase, lengths)
        _total.generated_tokens += num_generated
        _total.trained_tokens += int(np.sum(lengths)) if phase == "training" else 0


def saw_gpu(gpu: GpuUse) -> None:
    """Records the GPU of a worker, as that has found it."""
    with _lock:
        _total.device = gpu.name
        _total.peak_gpu_gib = max(_total.peak_gpu_gib, gpu.peak_gib)


def saw_engine_gpu(gpu: GpuUse) -> None:
    """As `saw_gpu`, of a worker of an engine."""
    with _lock:
        _total.device = _total.device or gpu.name
        _total.peak_engine_gpu_gib = max(_total.peak_engine_gpu_gib, gpu.peak_gib)


def saw_process(does: str, numerics: dict[str, str]) -> None:
    """Records what the bits of a worker's results follow, as that has found it.

    Args:
        does: "training" or "generation".
        numerics: Of one of the workers, which are of one kind.
    """
    with _lock:
        _total.processes[does] = numerics


class Owner(Protocol):
    """An owner of other processes."""

    def cpu_seconds(self, timeout_seconds: float) -> Mapping[str, float]:
        """CPU seconds by process, each since its start; without those that answer too late."""


def watch(owner: Owner) -> None:
    """Includes the owner's processes, until `unwatch` or until the owner is garbage collected."""
    _owners.add(owner)


def unwatch(owner: Owner) -> None:
    """Reads the owner's processes a last time; does nothing if they are not watched."""
    if owner in _owners:
        _owners.discard(owner)
        _seen.update(owner.cpu_seconds(_LAST_TIMEOUT_SECONDS))


def cpu_seconds() -> float:
    """User and system time of this process, its ended children, and all workers."""
    for owner in list(_owners):
        _seen.update(owner.cpu_seconds(_TIMEOUT_SECONDS))
    own = os.times()
    return sum(own[:4]) + sum(_seen.values())


@contextmanager
def measured() -> Iterator[Spent]:
    """Measures the usage inside, also of work that fails.

    A worker started inside counts from its start.
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
        # A stage around this one has seen these workers and GPUs too.
        _total.processes = {**before.processes, **_total.processes}
        _total.device = _total.device or before.device
        _total.peak_gpu_gib = max(_total.peak_gpu_gib, before.peak_gpu_gib)
        _total.peak_engine_gpu_gib = max(_total.peak_engine_gpu_gib, before.peak_engine_gpu_gib)
