"""The kind of machine that a result was computed on."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

_CHOOSE_KERNELS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "VLLM_ATTENTION_BACKEND",
)

_DRIVER = Path("/proc/driver/nvidia/version")
_VECTOR_FLAGS = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")


class Machine(BaseModel):
    """The kind of a machine; no host name, so that a manifest can be published.

    The last bits of sums depend on it: libraries choose kernels by the instruction set and split
    sums between threads.

    Attributes:
        instruction_set: The processor's vector extensions, such as "avx2 avx512f fma".
        driver: Version of NVIDIA's driver on the machine of the stage's process; empty without one.
            CUDA's version is part of torch's.
        processes: `process_numerics` of the computing processes without their variables, by role:
            "training", "generation", or "stage" for a stage without workers.
        process_variables: For each process of `processes`, the variables whose values differ from
            `variables`, as on the pods of workers; "" for a variable that is not set there. None in
            records of earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_model: str
    cores: int
    instruction_set: str = ""
    threads: int = 0
    driver: str = ""
    variables: dict[str, str] = {}
    processes: dict[str, dict[str, str]] = {}
    process_variables: dict[str, dict[str, str]] | None = None

    @classmethod
    def current(cls, threads: int | None = None) -> "Machine":
        """Returns this machine; without `threads`, workers have the libraries' default."""
        cpuinfo = Path("/proc/cpuinfo")
        model, extensions = read_cpuinfo(cpuinfo.read_text() if cpuinfo.exists() else "")
        return cls(
            cpu_model=model or platform.processor() or platform.machine(),
            cores=os.cpu_count() or 1,
            instruction_set=extensions,
            threads=threads or _default_threads(),
            driver=_driver(),
            variables=_variables(),
        )

    def with_processes(self, processes: Mapping[str, Mapping[str, str]]) -> "Machine":
        """Returns this machine with `process_numerics` of the computing processes, by role."""
        numerics, different = {}, {}
        for role, values in processes.items():
            numerics[role] = {name: values[name] for name in values if name not in _CHOOSE_KERNELS}
            different[role] = {
                name: values.get(name, "")
                for name in _CHOOSE_KERNELS
                if values.get(name) != self.variables.get(name)
            }
        return self.model_copy(update={"processes": numerics, "process_variables": different})

    def variable_in(self, role: str, name: str) -> str:
        """Returns a variable's value in the process of a role; empty if it was not set."""
        different = (self.process_variables or {}).get(role, {})
        return different.get(name, self.variables.get(name, ""))


def process_numerics(worker: Any = None) -> dict[str, str]:
    """Returns the settings of this process's libraries that affect the bits of its results.

    Imports nothing, since a process that computes has imported torch already; empty without torch.
    A worker's method `kernels`, if present, adds entries.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    numerics = {
        "threads": str(torch.get_num_threads()),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "float32_matmul_precision": str(torch.get_float32_matmul_precision()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if torch.cuda.is_available():
        numerics |= {
            "gpu": str(torch.cuda.get_device_name()),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return {**numerics, **_variables(), **getattr(worker, "kernels", dict)()}


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _CHOOSE_KERNELS if name in os.environ}


def read_cpuinfo(text: str) -> tuple[str, str]:
    """Returns model and vector extensions of the first processor, in Linux's names."""
    first, _, _ = text.partition("\n\n")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    flags = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", ""), " ".join(sorted(filter(_VECTOR_FLAGS.match, flags)))


def read_driver(text: str) -> str:
    """Returns the version in the text of NVIDIA's kernel module; empty if it has none."""
    match = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", text)
    return match[1] if match else ""


@cache
def _driver() -> str:
    return read_driver(_DRIVER.read_text()) if _DRIVER.exists() else ""


def _default_threads() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) else len(os.sched_getaffinity(0))
