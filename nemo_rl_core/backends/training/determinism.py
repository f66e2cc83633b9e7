"""Deterministic kernels and the precision of matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


def compute_deterministically(
    setting: bool | Literal["auto"] = True, *, device: torch.device | None = None
) -> bool:
    """Makes torch use deterministic kernels or the fastest; returns whether they are deterministic.

    With deterministic kernels, an operator that has none raises. Memory of `torch.empty` is not
    filled: filling it would reveal reads of uninitialized memory, but costs 6 % of a training step
    on an H100.

    Args:
        setting: Value of `training.deterministic`; `auto` uses the fastest kernels on GPUs.
    """
    is_on_cpu = device is None or device.type == "cpu"
    is_deterministic = is_on_cpu if setting == "auto" else setting
    torch.use_deterministic_algorithms(is_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return is_deterministic


@contextmanager
def full_precision() -> Iterator[None]:
    """Context with matrix products in full float32, for comparisons with float32 bounds."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
