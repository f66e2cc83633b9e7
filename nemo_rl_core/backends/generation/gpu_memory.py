"""How much of its GPU an engine holds.

Torch does not know: vLLM allocates what sleeps beside torch's allocator, and CUDA's graphs and
contexts count as well. NVML does, but only what is held at the moment of the question. So an engine
asks while it is awake.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.telemetry.gpu_use import GpuUse, gpu_use
from nemo_rl_core.telemetry.nvml import opened_nvml


def held_gpu_gib() -> float:
    """What this process holds of its GPU now; 0 without a GPU or without NVML.

    In a container with process ids of its own NVML does not know this process: then it is what all
    processes hold of that GPU.
    """
    if not torch.cuda.is_available():
        return 0.0
    with opened_nvml() as nvml:
        if nvml is None:
            return 0.0
        uuid = torch.cuda.get_device_properties(local_device()).uuid
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            held = {
                each.pid: each.usedGpuMemory
                for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            }.get(os.getpid())
            if held is None:
                held = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except nvml.NVMLError:  # of a MIG device, or a driver that does not tell
            return 0.0
    return float(held) / 2**30


def engine_gpu_use(backend: Any, *, anew: bool = False) -> GpuUse | None:
    """The GPU of an engine's worker; None on a CPU.

    Args:
        backend: Its `most_gpu_gib`, if it has one, is the most that it held when it asked.
        anew: Whether the peak is counted from now on.
    """
    found = gpu_use(anew=anew, device=local_device())
    if found is None:
        return None
    if anew:
        backend.most_gpu_gib = 0.0
    held = max(getattr(backend, "most_gpu_gib", 0.0), held_gpu_gib())
    return replace(found, peak_gib=max(found.peak_gib, held))
