"""How quick this machine is, beside which every time of a test run is reported.

`python tests/benchmarks/machine.py` prints its cores and the CPU-seconds of ten million additions
in a plain loop: 0.5 to 0.8 on a quick core, 3 on a slow or shared one.
"""

import os
import time
from pathlib import Path


def loop_seconds() -> float:
    """CPU-seconds of the loop; of globals, as a script has them."""
    names: dict[str, int] = {"x": 0}
    started = time.process_time()
    exec("for i in range(10_000_000): x += i", names)
    return time.process_time() - started


def processor() -> str:
    """The model of the processor; empty where Linux does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    load = os.getloadavg()[0]
    print(  # noqa: T201
        f"machine: {len(os.sched_getaffinity(0))} cores ({processor()}), load {load:.1f}; "
        f"10 M additions in {loop_seconds():.2f} CPU-s"
    )
