"""Samples the machine's load every few seconds: processors, memory, disk, network, GPUs.

Values are of the whole machine, since Ray's workers are separate processes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from nemo_rl_core.telemetry.nvml import opened_nvml

logger = logging.getLogger(__name__)

_MIB, _GIB = 2.0**20, 2.0**30


def read_machine(store: Path) -> dict[str, float]:
    """Reads CPU load in percent of all cores, memory in GiB, and total I/O in MiB.

    Args:
        store: Folder of the store, whose disk is read.
    """
    memory = psutil.virtual_memory()
    found = {
        "cpu_percent": psutil.cpu_percent(),
        "load_1min": psutil.getloadavg()[0],
        "memory_used_gib": (memory.total - memory.available) / _GIB,
        "memory_total_gib": memory.total / _GIB,
        "disk_free_gib": psutil.disk_usage(str(store)).free / _GIB,
    }
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    if disk is not None:
        found |= {
            "disk_read_mib": disk.read_bytes / _MIB,
            "disk_written_mib": disk.write_bytes / _MIB,
        }
    if network is not None:
        found |= {
            "network_received_mib": network.bytes_recv / _MIB,
            "network_sent_mib": network.bytes_sent / _MIB,
        }
    return found | _gpus()


def _gpus() -> dict[str, float]:
    """Reads NVML, if it is installed and there is a device."""
    with opened_nvml() as nvml:
        count = nvml.nvmlDeviceGetCount() if nvml else 0
        return {key: value for index in range(count) for key, value in _gpu(nvml, index)}


def _gpu(pynvml: Any, index: int) -> Iterator[tuple[str, float]]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    yield f"gpu{index}_memory_used_gib", memory.used / _GIB
    yield f"gpu{index}_memory_total_gib", memory.total / _GIB
    with contextlib.suppress(pynvml.NVMLError):  # MIG devices have no rates
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        yield f"gpu{index}_percent", float(rates.gpu)
    with contextlib.suppress(pynvml.NVMLError):
        yield f"gpu{index}_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with contextlib.suppress(pynvml.NVMLError):
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        yield f"gpu{index}_celsius", float(celsius)


class MachineSampler:
    """Samples the machine on a thread, at once and then every few seconds, until it is closed.

    Args:
        every_seconds: Interval between samples.
        store: Folder of the store.
        callback: Called with the whole seconds since the start, and the values by name.
    """

    def __init__(
        self, every_seconds: float, store: Path, callback: Callable[[int, dict[str, float]], None]
    ) -> None:
        self._every, self._store, self._callback = every_seconds, store, callback
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        start = time.monotonic()
        psutil.cpu_percent()  # the first call has no reference, and returns 0
        while True:
            try:
                self._callback(round(time.monotonic() - start), read_machine(self._store))
            except Exception:  # a value that this machine lacks must never end a run
                logger.warning("the machine's load is no longer sampled", exc_info=True)
                return
            if self._ended.wait(self._every):
                return
