"""The GPU of a worker: what it is called, and how much of its memory torch has held."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuUse:
    """The GPU of one process.

    Attributes:
        name: As its driver calls it.
        memory_gib: Of the device.
        peak_gib: The most that torch has held of it since it was counted anew, caches included; of
            an engine also what torch does not know of (`engine_gpu_use`).
    """

    name: str
    memory_gib: float
    peak_gib: float


def gpu_use(
    _: Any = None, *, anew: bool = False, device: "torch.device | None" = None
) -> GpuUse | None:
    """That of this process; None on a CPU. Imports nothing: who computes has torch already.

    Args:
        anew: Whether the peak is counted from now on: a worker serves one stage after the other.
        device: Of several that the process sees; by default torch's current one.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    device = device or torch.cuda.current_device()
    if anew:
        torch.cuda.reset_peak_memory_stats(device)
    properties = torch.cuda.get_device_properties(device)
    peak = float(torch.cuda.max_memory_reserved(device)) / 2**30
    return GpuUse(str(properties.name), float(properties.total_memory) / 2**30, peak)
