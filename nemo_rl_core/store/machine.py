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
"""Variables by which libraries choose kernels."""

_DRIVER = Path("/proc/driver/nvidia/version")
_VECTOR_FLAGS = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")


class Machine(BaseModel):
    """The kind of a machine; no host name, so that a manifest can be published.

    The last bits of sums depend on it: libraries choose kernels by the instruction set, and divide
    sums among threads.

    Attributes:
        cpu_model: The model name of the processor.
        cores: Number of logical cores.
        instruction_set: The processor's vector extensions, such as "avx2 avx512f fma".
        threads: Threads of each worker; of a stage without workers, the libraries' default.
        driver: Version of NVIDIA's driver on the machine of the stage's own process; empty without
            one. CUDA's version is part of torch's.
        variables: Variables of the environment that choose kernels, those that are set.
        processes: `process_numerics` of those that computed, by what they did: "training",
            "generation"; "stage" for a stage without workers. Without their variables.
        process_variables: Of the same processes: the variables that have another value than in
            `variables`, as on the pods of workers; empty for one that is not set there. None in
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
        """Returns this machine.

        Args:
            threads: Threads of each worker; None for the libraries' default.
        """
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

    def with_processes(self, found: Mapping[str, Mapping[str, str]]) -> "Machine":
        """Returns this machine with a record of the processes that computed.

        Args:
            found: `process_numerics` of each, by what it did.
        """
        numerics, apart = {}, {}
        for does, each in found.items():
            numerics[does] = {name: each[name] for name in each if name not in _CHOOSE_KERNELS}
            apart[does] = {
                name: each.get(name, "")
                for name in _CHOOSE_KERNELS
                if each.get(name) != self.variables.get(name)
            }
        return self.model_copy(update={"processes": numerics, "process_variables": apart})

    def variable_in(self, does: str, name: str) -> str:
        """Returns a variable as the process that did this had it; empty if it was not set."""
        apart = (self.process_variables or {}).get(does, {})
        return apart.get(name, self.variables.get(name, ""))


def process_numerics(worker: Any = None) -> dict[str, str]:
    """What the bits of this process's results follow, as its libraries have it.

    Imports nothing: who computes has torch already.

    Args:
        worker: Which computes here; its method `kernels`, where it has one, names others.

    Returns:
        By name: threads, torch's choice of vector extensions, TF32, and on a GPU its name, driver
        and libraries; variables that choose kernels, by their own names. Empty without torch.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {
        "threads": str(torch.get_num_threads()),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "float32_matmul_precision": str(torch.get_float32_matmul_precision()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": str(torch.cuda.get_device_name()),
            "driver": _driver(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return {**found, **_variables(), **getattr(worker, "kernels", dict)()}


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _CHOOSE_KERNELS if name in os.environ}


def read_cpuinfo(text: str) -> tuple[str, str]:
    """Returns model and vector extensions of the first processor, as Linux names them."""
    first, _, _ = text.partition("\n\n")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    flags = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", ""), " ".join(sorted(filter(_VECTOR_FLAGS.match, flags)))


def read_driver(text: str) -> str:
    """Returns the version in the text of NVIDIA's kernel module; empty if it has none."""
    found = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", text)
    return found[1] if found else ""


@cache
def _driver() -> str:
    return read_driver(_DRIVER.read_text()) if _DRIVER.exists() else ""


def _default_threads() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) else len(os.sched_getaffinity(0))
