"""Checks a recipe's resource requests before Ray is asked, which would wait forever."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from nemo_rl_core.errors import ResourceError

Resource = Literal["CPU", "GPU", "memory"]
"""CPU cores, GPUs (both as Ray spells them), and main memory in GiB."""

_SHOWN = {"CPU": "{:g} CPU cores", "GPU": "{:g} GPUs", "memory": "{:.6g} GiB memory"}


class ResourceManager:
    """Compares requests with the resources of a machine or a cluster.

    Args:
        count: Returns how much of a resource there is; called only for requested resources, since
            counting GPUs may start a program.
        name: Name of the machine or cluster for messages.
        is_this_machine: Whether it is this machine, whose torch may see no GPUs.

    Example:
        >>> node = ResourceManager({"CPU": 8, "GPU": 1, "memory": 64}.__getitem__, name="the node")
        >>> node.missing({"CPU": 4, "GPU": 2})
        {'GPU': 1}
    """

    def __init__(
        self, count: Callable[[Resource], float], *, name: str, is_this_machine: bool = True
    ) -> None:
        self._count, self._is_this_machine = count, is_this_machine
        self.name = name

    @classmethod
    def of_this_machine(cls) -> "ResourceManager":
        """Returns the resources of this process's machine or container."""
        return cls(_count_here, name="this machine")

    @classmethod
    def of_ray(
        cls, resources: Mapping[str, float], *, name: str, is_this_machine: bool = True
    ) -> "ResourceManager":
        """Reads the result of `ray.cluster_resources()` or `ray.available_resources()`."""
        unit = {"memory": 2**30}  # Ray counts bytes
        return cls(
            lambda key: resources.get(key, 0.0) / unit.get(key, 1),
            name=name,
            is_this_machine=is_this_machine,
        )

    def missing(self, request: Mapping[Resource, float]) -> dict[Resource, float]:
        """Returns the available amount of each resource that is less than requested."""
        available = {key: self._count(key) for key, amount in request.items() if amount}
        return {key: amount for key, amount in available.items() if amount < request[key]}

    def check(self, request: Mapping[Resource, float], *, fix: str | None = None) -> None:
        """Refuses a request that can never be met.

        Args:
            fix: Fix in the error; by default to choose a smaller shape.
        """
        if missing := self.missing(request):
            raise ResourceError(
                f"{self.name} is smaller than the requested cluster",
                expected=", ".join(_SHOWN[key].format(request[key]) for key in missing),
                got=", ".join(_SHOWN[key].format(has) for key, has in missing.items())
                + (_why_no_gpus() if missing.get("GPU") == 0 and self._is_this_machine else ""),
                fix=fix or _smaller(missing),
            )


def _smaller(missing: Mapping[Resource, float]) -> str:
    if "GPU" in missing:
        return "set `cluster: {shape: laptop}`, which needs no GPU, or use a larger machine"
    return "use a larger machine, or fewer workers (`cluster: {shape: laptop}` is the smallest)"


def _count_here(resource: Resource) -> float:
    match resource:
        case "CPU":
            return os.cpu_count() or 1
        case "GPU":
            return count_gpus()
        case "memory":
            return total_memory_gib()


def count_gpus() -> int:
    """Counts the GPUs that this process may use.

    Asks torch if it is imported already, else the driver, since importing torch takes seconds.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    num_gpus = _count_by_nvidia_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    # As in CUDA, an empty list or one that starts with -1 hides all GPUs.
    chosen = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(num_gpus, len(chosen))


def _count_by_nvidia_smi() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _why_no_gpus() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return " (the installed torch is built for CPUs only)"
    return ""


def total_memory_gib() -> float:
    """Returns the memory of this machine, or of its container if that is less, in GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.is_file() and (limit := cgroup.read_text().strip()).isdecimal():
        limits.append(int(limit))
    return min(limits) / 2**30
