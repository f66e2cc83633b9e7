"""Results that are equal to the bit, however often a step is computed; and their precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_deterministically() -> None:
    """Makes torch take deterministic kernels; one that has none raises.

    Memory of `torch.empty` is left as it is: to fill it would find reads of what was never written,
    and costs a training step on an H100 6 % of its time.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in full float32, for comparisons whose bounds are those of float32."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
