"""Bounds for checks of a model, derived from the effect of rounding on its outputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from nemo_rl_core.config.model import DType

_EXACT = 1e-3
_LEAST_SPREAD = 0.05
"""Smallest spread of outputs; a new head of zeros would otherwise leave no room for rounding."""


def size_of(differences: torch.Tensor, dtype: DType) -> float:
    """Returns the largest absolute difference, or the mean in bfloat16.

    Rounding to bfloat16 changes a logit of 20 to 30 by up to 0.06, so a few tokens of a pretrained
    model differ by more than 0.5 nats between two correct kernels.
    """
    sizes = differences.abs()
    return float(sizes.max() if dtype == "float32" else sizes.mean())


def rounding_bound(
    read: Callable[[], torch.Tensor], layers: Iterable[torch.nn.Module], dtype: DType
) -> float:
    """Returns the bound on `size_of` between two correct passes of this model.

    In float32 it is 1e-3, scaled by the spread of the outputs if that is below 1, since a model
    that divides its logits also divides its errors. In bfloat16, for kernels without float32, it is
    measured: each layer's output is rounded to 6 significant bits (bfloat16 has 8). For Llama,
    Qwen3 and Mixtral with 2 to 30 layers, this changes logprobs by 0.5 to 3.6 times as much as
    bfloat16 does compared with float32, so twice the effect bounds the difference of two kernels.

    Args:
        read: Function that returns the outputs of a pass, in nats or scores. It is called once, or
            twice in bfloat16, and is a collective if the pass is one.
    """
    usual = read()
    exact = exact_bound(float(usual.float().std()))
    if dtype == "float32":
        return exact
    with _coarser(layers):
        return exact + 2 * size_of(read() - usual, dtype)


def exact_bound(spread: float) -> float:
    """Returns the float32 bound for outputs with this spread."""
    return _EXACT * min(1.0, max(spread, _LEAST_SPREAD))


@contextmanager
def _coarser(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    hooks = [
        layer.register_forward_hook(lambda _, __, output: tree_map(_rounded, output))
        for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(output: object) -> object:
    """Rounds a tensor of floats to 6 significant bits; returns anything else unchanged."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return output
    bits = output.float().view(torch.int32)
    return ((bits + 0x20000) & -0x40000).view(torch.float32).to(output.dtype)
