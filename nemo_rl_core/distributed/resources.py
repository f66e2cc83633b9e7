"""Is there what a recipe asks for? Asked first, since Ray would wait for ever."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from nemo_rl_core.errors import ResourceError

Resource = Literal["CPU", "GPU", "memory"]
"""CPU cores, GPUs, and main memory in GiB; the first two as Ray spells them."""

_SHOWN = {"CPU": "{:g} CPU cores", "GPU": "{:g} GPUs", "memory": "{:.6g} GiB memory"}


class ResourceManager:
    """What a machine or a cluster has, and what it lacks for a request.

    Args:
        count: How much of a resource there is; asked only for what a request names, since counting
            GPUs may start a program.
        name: Of what has them, for messages.
        is_here: Whether it is this machine, whose torch may see no GPUs.

    Example:
        >>> node = ResourceManager({"CPU": 8, "GPU": 1, "memory": 64}.__getitem__, name="the node")
        >>> node.missing({"CPU": 4, "GPU": 2})
        {'GPU': 1}
    """

    def __init__(
        self, count: Callable[[Resource], float], *, name: str, is_here: bool = True
    ) -> None:
        self._count, self._is_here = count, is_here
        self.name = name

    @classmethod
    def of_this_machine(cls) -> "ResourceManager":
        """The machine that this process runs on, or its container."""
        return cls(_count_here, name="this machine")

    @classmethod
    def of_ray(
        cls, resources: Mapping[str, float], *, name: str, is_here: bool = True
    ) -> "ResourceManager":
        """What Ray reports, as `ray.cluster_resources()` or `ray.available_resources()` gives."""
        unit = {"memory": 2**30}  # Ray counts bytes
        return cls(
            lambda key: resources.get(key, 0.0) / unit.get(key, 1), name=name, is_here=is_here
        )

    def missing(self, request: Mapping[Resource, float]) -> dict[Resource, float]:
        """How much there is of each resource of which there is less than asked for."""
        found = {resource: self._count(resource) for resource, wanted in request.items() if wanted}
        return {resource: has for resource, has in found.items() if has < request[resource]}

    def check(self, request: Mapping[Resource, float], *, fix: str | None = None) -> None:
        """Refuses a request that can never be met.

        Args:
            request: How much of each resource.
            fix: What to do about it; by default, to choose a smaller shape.

        Raises:
            ResourceError: Names all that is missing.
        """
        if missing := self.missing(request):
            raise ResourceError(
                f"{self.name} is smaller than the cluster that is asked for",
                expected=", ".join(_SHOWN[key].format(request[key]) for key in missing),
                got=", ".join(_SHOWN[key].format(has) for key, has in missing.items())
                + (_why_no_gpus() if missing.get("GPU") == 0 and self._is_here else ""),
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


def _why_no_gpus() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return " (the installed torch is built for CPUs only)"
    return ""


def total_memory_gib() -> float:
    """The memory of this machine, or of its container where that is less, in GiB."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.is_file() and (limit := cgroup.read_text().strip()).isdecimal():
        limits.append(int(limit))
    return min(limits) / 2**30
