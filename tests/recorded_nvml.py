"""A fake `pynvml` that accepts only calls that the real module accepts.

`SIGNATURES` are those of nvidia-ml-py 13.615.71, which deployment/requirements/gpu.txt pins.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

SIGNATURES = {
    "nvmlInit": "()",
    "nvmlShutdown": "()",
    "nvmlDeviceGetCount": "()",
    "nvmlDeviceGetHandleByIndex": "(index)",
    "nvmlDeviceGetHandleByUUID": "(uuid)",
    "nvmlDeviceGetMemoryInfo": "(handle, version=None)",
    "nvmlDeviceGetComputeRunningProcesses": "(handle)",
    "nvmlDeviceGetUtilizationRates": "(handle)",
    "nvmlDeviceGetPowerUsage": "(handle)",
    "nvmlDeviceGetTemperature": "(handle, sensor)",
}


class NVMLError(Exception):
    """Base class of the library's errors; a direct subclass of `Exception`."""


class FakeNvml:
    """The library on a machine with some GPUs.

    Args:
        gpus: Bytes used by each process id, by GPU UUID.
        is_installed: Whether a driver is installed.
    """

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(
        self, gpus: Mapping[str, Mapping[int, int | None]], *, is_installed: bool = True
    ) -> None:
        self._gpus, self._is_installed = gpus, is_installed
        self.num_open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in SIGNATURES:
            raise AttributeError(name)
        names: dict[str, Any] = {}
        exec(f"def {name}{SIGNATURES[name]}: pass", names)
        signature = inspect.signature(names[name])

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if name != "nvmlInit" and not self.num_open:
                raise NVMLError("Uninitialized")
            method = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
            return getattr(self, f"_{method}")(*bound.args, **bound.kwargs)

        return call

    def _nvml_init(self) -> None:
        if not self._is_installed:
            raise NVMLError("NVML Shared Library Not Found")
        self.num_open += 1

    def _nvml_shutdown(self) -> None:
        self.num_open -= 1

    def _nvml_device_get_count(self) -> int:
        return len(self._gpus)

    def _nvml_device_get_handle_by_index(self, index: int) -> str:
        return list(self._gpus)[index]

    def _nvml_device_get_handle_by_uuid(self, uuid: str) -> str:
        if uuid not in self._gpus:
            raise NVMLError("Not Found")
        return uuid

    def _nvml_device_get_memory_info(self, handle: str) -> Any:
        used = sum(used or 0 for used in self._gpus[handle].values())
        return SimpleNamespace(used=used, total=80 * 2**30)

    def _nvml_device_get_compute_running_processes(self, handle: str) -> list[Any]:
        processes = self._gpus[handle].items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    def _nvml_device_get_utilization_rates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def _nvml_device_get_power_usage(self, handle: str) -> int:
        raise NVMLError("Not Supported")

    def _nvml_device_get_temperature(self, handle: str, sensor: int) -> int:
        return 61
