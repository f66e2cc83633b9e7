"""Where a process runs, as routes of weights depend on it."""

import socket
from pathlib import Path

import torch

from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.planning.routes import Location


def current_location() -> Location:
    """Where this process runs."""
    gpu = None
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(local_device()).uuid)
    return Location(current_machine(), gpu)


def current_machine() -> str:
    """Host name and, because containers share one, name space of processes."""
    namespace = Path("/proc/self/ns/pid")
    shared = namespace.readlink() if namespace.exists() else "none"
    return f"{socket.gethostname()} {shared}"
