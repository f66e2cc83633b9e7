"""Bounds for checks of a model, from the effect of rounding to bfloat16 on its outputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from nemo_rl_core.config.model import DType

_EXACT = 1e-3
_LEAST_SPREAD = 0.05
"""Of outputs; a smaller one, such as of a new head of zeros, would leave no room for rounding."""


def size_of(differences: torch.Tensor, dtype: DType) -> float:
    """The largest absolute difference; in bfloat16 the mean.

    There a logit of 20 to 30 is off by up to 0.06 only from its rounding, so that a few tokens of
    a pretrained model differ by more than 0.5 nats between two correct kernels.

    Args:
        differences: Differences of outputs, any shape.
        dtype: Dtype of the matrix products.
    """
    sizes = differences.abs()
    return float(sizes.max() if dtype == "float32" else sizes.mean())


def rounding_bound(
    read: Callable[[], torch.Tensor], layers: Iterable[torch.nn.Module], dtype: DType
) -> float:
    """The bound on `size_of` between two correct passes of this model.

    In float32 it is 1e-3, times the spread of the outputs where that is below 1, since a model that
    divides its logits also divides its errors. In bfloat16, for kernels that lack float32, it is
    measured: each layer's output is rounded to 6 significant bits, of which bfloat16 has 8. Over
    Llama, Qwen3 and Mixtral of 2 to 30 layers, that changes logprobs by 0.5 to 3.6 times as much as
    bfloat16 does against float32, so twice its effect bounds the difference of two kernels.

    Args:
        read: Returns outputs of a pass, in nats or scores; called once, in bfloat16 twice; a
            collective if the pass is one.
        layers: The decoder's layers of this rank.
        dtype: Dtype of the matrix products.
    """
    usual = read()
    exact = exact_bound(float(usual.float().std()))
    if dtype == "float32":
        return exact
    with _coarser(layers):
        return exact + 2 * size_of(read() - usual, dtype)


def exact_bound(spread: float) -> float:
    """The bound in float32, for outputs of a spread."""
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
    """A tensor of floats to the nearest with 6 significant bits; anything else as it is."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return output
    bits = output.float().view(torch.int32)
    return ((bits + 0x20000) & -0x40000).view(torch.float32).to(output.dtype)
