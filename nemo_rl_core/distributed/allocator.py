"""Torch's allocator of a GPU in trainers: segments that grow, but for memory that others map.

Batches differ in length from step to step, and a block of one size is of no use for another: memory
is kept that nothing fits. Segments that grow (`expandable_segments`) have no such remains. Another
process can map them only if it may copy file descriptors of the trainer (`pidfd_getfd`), which
containers refuse; it can always map what `cudaMalloc` returns.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWS, _STAYS = "expandable_segments:True", "expandable_segments:False"


def allocator_environment() -> dict[str, str]:
    """The environment in which a trainer's worker on GPUs has segments that grow.

    What the user's environment says of the allocator stays. Engines must not have it: the memory
    that vLLM gives away while it sleeps is its own.
    """
    return {} if any(name in os.environ for name in _SETTINGS) else {_SETTINGS[0]: _GROWS}


@contextmanager
def memory_for_others() -> Iterator[None]:
    """Within it, what is allocated on a GPU lies in memory that any other process can map.

    Torch then takes neither a new segment that grows nor a free block of one.
    """
    from torch import _C  # not with this module, which what starts workers imports

    library: Any = _C
    settings: str = library._accelerator_getAllocatorSettings()
    if _GROWS not in settings:
        yield
        return
    # All settings at once: those that are left out would be reset.
    library._accelerator_setAllocatorSettings(settings.replace(_GROWS, _STAYS))
    try:
        yield
    finally:
        library._accelerator_setAllocatorSettings(settings)
