"""GPU specifications for plans: memory, peak FLOP/s, and bandwidths of memory and links."""

from dataclasses import dataclass, replace

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.telemetry.cost import peak_flops, query_first_gpu

OWN = "own"
"""Name that selects the GPU of this machine."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU.

    Attributes:
        name: Name of the GPU; the value of `cluster.accelerator` if that setting lists the GPU.
        device: Part of the driver's name for the GPU, by which `telemetry.cost` finds its peaks.
        memory_gib: Memory visible to a process, slightly less than the data sheet's GB.
        memory_gb_per_second: Memory bandwidth in 10^9 bytes.
        link_gb_per_second: Bandwidth to another GPU of the machine (NVLink or PCIe), one direction.
        network_gb_per_second: Bandwidth per GPU to another machine, one direction. Assumed: the
            usual network port per GPU of such machines.
    """

    name: str
    device: str
    memory_gib: float
    memory_gb_per_second: float
    link_gb_per_second: float
    network_gb_per_second: float

    def flops(self, dtype: str) -> float | None:
        """Returns the dense peak in FLOP/s; None if unknown."""
        return peak_flops(self.device, dtype)


_TABLE = (
    # NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM5), "H200", "B200" (HGX), "A100", "L40S",
    # "L4", "A10G" (with AWS's page on G5), "T4", and "Ada GPU architecture" for the RTX 4090.
    # NVLink 3, 4 and 5: 600, 900 and 1,800 GB/s in both directions; PCIe 4.0 x16: 32 GB/s in one.
    # Memory is what CUDA reports; for GPUs that were not available, 1.5 % below the data sheet.
    Accelerator("nvidia-b200", "B200", 178.0, 7700, 900, 50),
    Accelerator("nvidia-h200", "H200", 139.0, 4800, 450, 50),
    Accelerator("nvidia-h100", "H100", 79.0, 3350, 450, 50),
    Accelerator("nvidia-a100-80gb", "A100", 79.0, 2039, 300, 25),
    Accelerator("nvidia-tesla-a100", "A100", 39.3, 1555, 300, 25),
    Accelerator("nvidia-l40s", "L40S", 44.0, 864, 32, 12.5),
    Accelerator("nvidia-rtx-4090", "RTX 4090", 23.5, 1008, 32, 12.5),
    Accelerator("nvidia-l4", "L4", 22.0, 300, 32, 12.5),
    Accelerator("nvidia-a10g", "A10G", 22.0, 600, 32, 12.5),
    Accelerator("nvidia-tesla-t4", "T4", 14.5, 320, 16, 6.25),
)
ACCELERATORS = {each.name: each for each in _TABLE}
"""Supported kinds of GPUs, by name."""


def accelerator(name: str) -> Accelerator:
    """Returns an accelerator by name; `own` is the first GPU of this machine."""
    gpu = own_accelerator() if name == OWN else ACCELERATORS.get(name)
    if gpu is None:
        raise unknown_names(
            "this machine has no GPU that plans support"
            if name == OWN
            else "there is no accelerator",
            [name],
            list(ACCELERATORS),
            otherwise="choose one of them",
        )
    return gpu


def own_accelerator() -> Accelerator | None:
    """Returns this machine's first GPU with the memory from its driver; None without one."""
    return accelerator_of_device(query_first_gpu("name,memory.total"))


def accelerator_of_device(line: str) -> Accelerator | None:
    """Returns the kind of a GPU from "NAME, MEBIBYTES" of nvidia-smi; None if not supported.

    Example:
        >>> accelerator_of_device("NVIDIA A100-SXM4-40GB, 40960").name
        'nvidia-tesla-a100'
    """
    device, _, mebibytes = line.rpartition(",")
    if not mebibytes.strip().isdecimal():
        return None
    # The driver reserves about 0.5 GiB of what it reports.
    memory = int(mebibytes) / 1024 - 0.5
    kinds = [each for each in _TABLE if all(part in device for part in each.device.split())]
    if not kinds:
        return None
    # The longest name, since "L4" is a part of "L40S"; then the closer memory size.
    best = min(kinds, key=lambda each: (-len(each.device), abs(each.memory_gib - memory)))
    return replace(best, memory_gib=memory)
