"""The GPU of a worker: its name and the peak memory of torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
