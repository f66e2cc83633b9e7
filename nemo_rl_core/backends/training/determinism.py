"""Results that are equal to the bit, however often a step is computed."""

import torch


def compute_deterministically() -> None:
    """Makes torch take deterministic kernels; one that has none raises.

    Memory of `torch.empty` is left as it is: to fill it would find reads of what was never written,
    and costs a training step on an H100 6 % of its time.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
