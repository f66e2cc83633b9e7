"""GPU memory used by an engine's process, from NVML.

Torch does not report vLLM's sleep mode, CUDA graphs and contexts. NVML records no peak, so an
engine reads the usage while it is awake.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.telemetry.usage import GpuUse, gpu_use, opened_nvml


def used_gpu_gib() -> float:
    """Returns the GPU memory that this process uses now; 0 if there is no GPU or NVML.

    NVML cannot find this process in a container with a separate process namespace. The result is
    then the memory that all processes use on that GPU.
    """
    if not torch.cuda.is_available():
        return 0.0
    with opened_nvml() as nvml:
        if nvml is None:
            return 0.0
        uuid = torch.cuda.get_device_properties(local_device()).uuid
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            used = {
                process.pid: process.usedGpuMemory
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            }.get(os.getpid())
            if used is None:
                used = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except nvml.NVMLError:  # a MIG device, or a driver that does not report memory
            return 0.0
    return float(used) / 2**30


def engine_gpu_use(backend: Any, *, reset_peak: bool = False) -> GpuUse | None:
    """Returns the GPU use of an engine's worker; None on a CPU.

    The backend's optional `peak_gpu_gib` is the largest usage that it measured itself.
    """
    use = gpu_use(reset_peak=reset_peak, device=local_device())
    if use is None:
        return None
    if reset_peak:
        backend.peak_gpu_gib = 0.0
    peak_gib = max(use.peak_gib, getattr(backend, "peak_gpu_gib", 0.0), used_gpu_gib())
    return replace(use, peak_gib=peak_gib)
