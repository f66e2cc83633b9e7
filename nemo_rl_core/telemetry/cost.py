"""Costs of work: peaks of devices, utilization, and prices; FLOPs are in `model_flops`."""

import os
import subprocess
from functools import cache
from pathlib import Path

import yaml
from pydantic import Field, NonNegativeFloat, ValidationError

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError

_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"float8": 4500e12, "bfloat16": 2250e12, "float32": 80e12},
    "H200": {"float8": 1979e12, "bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"float8": 1513e12, "bfloat16": 756e12, "float32": 51e12},
    "H100": {"float8": 1979e12, "bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"float8": 733e12, "bfloat16": 362e12, "float32": 91.6e12},
    "RTX 4090": {"float8": 330e12, "bfloat16": 165e12, "float32": 82.6e12},
    "L4": {"float8": 242e12, "bfloat16": 121e12, "float32": 30.3e12},
    "A10G": {"bfloat16": 70e12, "float32": 35e12},
    "A10": {"bfloat16": 125e12, "float32": 31.2e12},
    "T4": {"float32": 8.1e12},
}
"""Dense peaks in FLOP/s from data sheets, by a part of the device's name. CPUs are not listed, as
their peak would have to be measured."""

PRICES = "NEMO_RL_PRICES"
"""The environment variable with the path of a price table; see `Prices`."""


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device; None if it is not in the table."""
    for name, peaks in _PEAKS.items():
        if all(part in device for part in name.split()):
            return peaks.get(dtype)
    return None


def model_flops_utilization(
    flops: float, *, gpu_seconds: float, device: str, dtype: str
) -> float | None:
    """Model FLOPs utilization (MFU), 0 to 1; None if the peak is unknown."""
    peak = peak_flops(device, dtype)
    return None if peak is None or not gpu_seconds else flops / (gpu_seconds * peak)


class Prices(FrozenConfig):
    """Prices per hour; a missing price is unknown, and then the total is unknown too.

    They are in the YAML file named by `NEMO_RL_PRICES`, such as
    `{currency: USD, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}`. Prices are not part of a recipe,
    so a new price makes nothing run again.

    Attributes:
        currency: Name of the currency.
        cpu_core_hour: Price of one core, for CPU time.
        gpu_hour: Price of a GPU by part of its name, for the time that a stage reserves it.
    """

    currency: str = "USD"
    cpu_core_hour: NonNegativeFloat | None = None
    gpu_hour: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> "Prices | None":
        """Reads the price table named by `NEMO_RL_PRICES`; None without one."""
        path = os.environ.get(PRICES)
        if not path:
            return None
        try:
            return cls.model_validate(yaml.safe_load(Path(path).read_text()) or {})
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ConfigError(
                f"the price table {path!r} cannot be read",
                expected="YAML such as {currency: USD, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}",
                got=str(error).splitlines()[0],
                fix=f"correct the file, or unset {PRICES}",
            ) from error

    def total(self, *, cpu_seconds: float, gpu_seconds: float, device: str) -> float | None:
        """Returns the price of these seconds; None if one of the prices is unknown."""
        gpu = next((price for name, price in self.gpu_hour.items() if name in device), None)
        if self.cpu_core_hour is None or (gpu_seconds and gpu is None):
            return None
        return (cpu_seconds * self.cpu_core_hour + gpu_seconds * (gpu or 0.0)) / 3600


@cache
def gpu_name() -> str:
    """Name of this machine's first GPU; empty without one."""
    return query_first_gpu("name")


def query_first_gpu(fields: str) -> str:
    """Returns properties of this machine's first GPU from its driver; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()
