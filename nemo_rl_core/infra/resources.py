"""Does this machine have what a recipe asks for? Asked first, since Ray would wait for ever."""

import os
import subprocess
import sys
from pathlib import Path

from nemo_rl_core.errors import ResourceError


def check_shape(num_cpus: int, *, num_gpus: int = 0, memory_gib: float = 0.0) -> None:
    """Refuses a cluster shape that this machine cannot hold.

    Args:
        num_cpus: Cores the shape asks for.
        num_gpus: GPUs the shape asks for.
        memory_gib: Main memory the shape asks for.

    Raises:
        ResourceError: Names all that is missing, and the shape to choose.
    """
    cores, memory = os.cpu_count() or 1, total_memory_gib()
    gpus = count_gpus() if num_gpus else 0
    wanted = (
        (cores >= num_cpus, f"{num_cpus} CPU cores", f"{cores} CPU cores"),
        (gpus >= num_gpus, f"{num_gpus} GPUs", f"{gpus} GPUs"),
        (memory >= memory_gib, f"{memory_gib:g} GiB memory", f"{memory:.1f} GiB memory"),
    )
    missing = [(expected, got) for enough, expected, got in wanted if not enough]
    if missing:
        needs_fewer_gpus = gpus < num_gpus
        raise ResourceError(
            "this machine is smaller than the cluster that the recipe asks for",
            expected=", ".join(expected for expected, _ in missing),
            got=", ".join(got for _, got in missing) + _why_no_gpus(gpus, num_gpus),
            fix="set `cluster: {shape: laptop}`, which needs no GPU, or use a larger machine"
            if needs_fewer_gpus
            else "use a larger machine (`cluster: {shape: laptop}` is the smallest shape)",
        )


def count_gpus() -> int:
    """How many GPUs this process may use: by torch if it is imported already, else by the driver.

    torch is never imported for this, since it takes seconds and the answer is wanted at once.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    present = _count_by_nvidia_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # As CUDA reads it: an empty list or one that starts with -1 hides them all.
    chosen = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(present, len(chosen))


def _count_by_nvidia_smi() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _why_no_gpus(gpus: int, num_gpus: int) -> str:
    torch = sys.modules.get("torch")
    if gpus < num_gpus and torch is not None and torch.version.cuda is None:
        return " (the installed torch is built for CPUs only)"
    return ""


def total_memory_gib() -> float:
    """The memory of this machine, or of its container where that is less, in GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.is_file() and (limit := cgroup.read_text().strip()).isdecimal():
        limits.append(int(limit))
    return min(limits) / 2**30
