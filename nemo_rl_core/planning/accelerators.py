"""GPUs as plans see them: memory, peak FLOP/s, and the bandwidths of memory and links."""

import subprocess
from dataclasses import dataclass, replace

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.telemetry.cost import peak_flops

OWN = "own"
"""The name that stands for the GPU of this machine."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU.

    Attributes:
        name: As `cluster.accelerator` has it, where that knows it.
        device: A part of what the driver calls it, which `telemetry.cost` has the peaks of.
        memory_gib: What a process sees of its memory, a little less than the data sheet's GB.
        memory_gb_per_second: Bandwidth of its memory, in 10^9 bytes.
        link_gb_per_second: To another GPU of the machine, one direction: NVLink, or PCIe.
        network_gb_per_second: To another machine, one direction, for each GPU. Assumed: the network
            port that machines with such GPUs usually have a GPU.
    """

    name: str
    device: str
    memory_gib: float
    memory_gb_per_second: float
    link_gb_per_second: float
    network_gb_per_second: float

    def flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s; None if it is not known."""
        return peak_flops(self.device, dtype)


_TABLE = (
    # NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM5), "H200", "B200" (HGX), "A100", "L40S",
    # "L4", "A10G" (with AWS's page on G5), "T4", and "Ada GPU architecture" for the RTX 4090.
    # NVLink 3, 4 and 5: 600, 900 and 1,800 GB/s in both directions; PCIe 4.0 x16: 32 GB/s in one.
    # Memory is what CUDA reports there; of those that no session has seen, 1.5 % below the sheet.
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
"""The kinds that plans know, by name."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name; `own` is the first GPU of this machine.

    Raises:
        ConfigError: If there is none of that name, or no GPU here that the table has.
    """
    found = own_accelerator() if name == OWN else ACCELERATORS.get(name)
    if found is None:
        raise unknown_names(
            "this machine has no GPU that plans know" if name == OWN else "there is no accelerator",
            [name],
            list(ACCELERATORS),
            otherwise="choose one of them",
        )
    return found


def own_accelerator() -> Accelerator | None:
    """The first GPU of this machine, with the memory that its driver reports; None without one."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return accelerator_of_device((done.stdout.splitlines() or [""])[0])


def accelerator_of_device(line: str) -> Accelerator | None:
    """The kind of a GPU, with its own memory; None if the table lacks it.

    Args:
        line: Name and MiB of memory, as `nvidia-smi --query-gpu=name,memory.total` prints them.

    Example:
        >>> accelerator_of_device("NVIDIA A100-SXM4-40GB, 40960").name
        'nvidia-tesla-a100'
    """
    device, _, mebibytes = line.rpartition(",")
    if not mebibytes.strip().isdecimal():
        return None
    # The driver keeps some 0.5 GiB of what it reports for itself.
    memory = int(mebibytes) / 1024 - 0.5
    kinds = [each for each in _TABLE if all(part in device for part in each.device.split())]
    if not kinds:
        return None
    # The longest name, since "L4" is a part of "L40S"; of two sizes, the nearer one.
    best = min(kinds, key=lambda each: (-len(each.device), abs(each.memory_gib - memory)))
    return replace(best, memory_gib=memory)
