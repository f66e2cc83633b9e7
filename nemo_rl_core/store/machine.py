"""The kind of machine that a result was computed on."""

import os
import platform
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_VECTOR_FLAGS = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")


class Machine(BaseModel):
    """The kind of machine; no name, so that a manifest can be shown to anyone.

    The last bits of sums depend on it: libraries choose their kernels by the instruction set, and
    divide sums among threads.

    Attributes:
        instruction_set: The processor's vector extensions, such as "avx2 avx512f fma".
        threads: That each worker computes with; of a stage without workers, what libraries take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_model: str
    cores: int
    instruction_set: str = ""
    threads: int = 0

    @classmethod
    def here(cls, threads: int | None = None) -> "Machine":
        """This machine.

        Args:
            threads: Of each worker; None for what libraries take by default.
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
    """The first processor's model and its vector extensions, as Linux names them on x86 and ARM."""
    first, _, _ = text.partition("\n\n")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    flags = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", ""), " ".join(sorted(filter(_VECTOR_FLAGS.match, flags)))


def _default_threads() -> int:
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else len(os.sched_getaffinity(0))
