"""Settings of torch's GPU allocator in trainers: expandable segments, except for shared memory.

Batches differ in length from step to step, and a cached block of one size cannot serve another:
memory fragments. Expandable segments (`expandable_segments`) do not. Another process can map them
only if it may copy file descriptors of the trainer (`pidfd_getfd`), which containers refuse; it can
always map memory from `cudaMalloc`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE, _FIXED = "expandable_segments:True", "expandable_segments:False"


def allocator_environment() -> dict[str, str]:
    """Returns environment variables that give a trainer's GPU worker expandable segments.

    Allocator settings in the user's environment take precedence. Engines must not have them: vLLM
    manages the memory that it frees while it sleeps.
    """
    return {} if any(name in os.environ for name in _SETTINGS) else {_SETTINGS[0]: _EXPANDABLE}


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Allocates GPU memory that any other process can map.

    Torch then uses neither new expandable segments nor free blocks of existing ones.
    """
    from torch import _C  # not at the top: the code that starts workers imports this module

    library: Any = _C
    settings: str = library._accelerator_getAllocatorSettings()
    if _EXPANDABLE not in settings:
        yield
        return
    # All settings at once: torch resets those that are left out.
    library._accelerator_setAllocatorSettings(settings.replace(_EXPANDABLE, _FIXED))
    try:
        yield
    finally:
        library._accelerator_setAllocatorSettings(settings)
