"""Results that are equal to the bit, however often a step is computed; and their precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


def compute_deterministically(
    wanted: bool | Literal["auto"] = True, *, device: torch.device | None = None
) -> bool:
    """Makes torch take deterministic kernels, or the fastest ones.

    Of deterministic ones, an operator that has none raises. Memory of `torch.empty` is left as it
    is: to fill it would find reads of what was never written, and costs a training step on an H100
    6 % of its time.

    Args:
        wanted: `training.deterministic`; `auto` takes the fastest kernels on GPUs.
        device: Where this process computes; read for `auto` alone.

    Returns:
        Whether kernels are deterministic.
    """
    is_wanted = (device is None or device.type == "cpu") if wanted == "auto" else wanted
    torch.use_deterministic_algorithms(is_wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return is_wanted


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in full float32, for comparisons whose bounds are those of float32."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
