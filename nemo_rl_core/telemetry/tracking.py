"""Forwards every reported step of a run to its trackers."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.events import Event, MachineSample, publish, subscribe
from nemo_rl_core.telemetry.logger_facade import LoggerFacade, Part, with_unique_names
from nemo_rl_core.telemetry.trackers import open_tracker
from nemo_rl_core.telemetry.usage import opened_nvml
from nemo_rl_core.types import StepReport

logger = logging.getLogger(__name__)

_MIB, _GIB = 2.0**20, 2.0**30


def read_machine(store: Path) -> dict[str, float]:
    """Reads the machine's CPU load in percent of all cores, memory in GiB, and total I/O in MiB."""
    memory = psutil.virtual_memory()
    samples = {
        "cpu_percent": psutil.cpu_percent(),
        "load_1min": psutil.getloadavg()[0],
        "memory_used_gib": (memory.total - memory.available) / _GIB,
        "memory_total_gib": memory.total / _GIB,
        "disk_free_gib": psutil.disk_usage(str(store)).free / _GIB,
    }
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    if disk is not None:
        samples |= {
            "disk_read_mib": disk.read_bytes / _MIB,
            "disk_written_mib": disk.write_bytes / _MIB,
        }
    if network is not None:
        samples |= {
            "network_received_mib": network.bytes_recv / _MIB,
            "network_sent_mib": network.bytes_sent / _MIB,
        }
    return samples | _gpus()


def _gpus() -> dict[str, float]:
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
    """Calls back with the seconds since the start and the machine's load, until it is closed."""

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
        psutil.cpu_percent()  # the first call has no reference and returns 0
        while True:
            try:
                self._callback(round(time.monotonic() - start), read_machine(self._store))
            except Exception:  # a value that this machine lacks must never end a run
                logger.warning("the machine's load is no longer sampled", exc_info=True)
                return
            if self._ended.wait(self._every):
                return


MACHINE = "machine"
"""The stage name of the machine's load; its steps are seconds."""


@contextmanager
def tracked(
    config: TrackingConfig,
    run: str,
    labels: Mapping[str, str] = MappingProxyType({}),
    *,
    part: Part = "run",
) -> Iterator[None]:
    """Sends the reports of the `with` block to trackers, and samples the machine's load.

    The block is a run or a stage, as `part` says.
    """
    openers = with_unique_names(
        [
            (each.kind, partial(open_tracker, each, run, labels, part=part))
            for each in config.trackers
        ]
    )
    with ExitStack() as stack:
        log = stack.enter_context(LoggerFacade(openers))
        stack.callback(subscribe(partial(_forward, log)))
        if config.sample_machine_every_seconds:
            sampler = MachineSampler(
                config.sample_machine_every_seconds,
                Store.default().root,
                lambda second, samples: publish(MachineSample(second, samples)),
            )
            stack.callback(sampler.close)
        yield


def _forward(log: LoggerFacade, event: Event) -> None:
    if isinstance(event, StepReport):
        step = int(event.metrics.get("global_step", event.step))
        log.log_metrics(event.stage, step, {**event.metrics, **event.timings})
    elif isinstance(event, MachineSample):
        log.log_metrics(MACHINE, event.second, event.figures)
