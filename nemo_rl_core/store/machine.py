"""The kind of machine that a result was computed on."""

import os
import platform
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

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
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_model: str
    cores: int
    instruction_set: str = ""
    threads: int = 0

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
        )


def read_cpuinfo(text: str) -> tuple[str, str]:
    """Returns model and vector extensions of the first processor, as Linux names them."""
    first, _, _ = text.partition("\n\n")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    flags = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", ""), " ".join(sorted(filter(_VECTOR_FLAGS.match, flags)))


def _default_threads() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) else len(os.sched_getaffinity(0))
