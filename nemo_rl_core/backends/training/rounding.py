"""Bounds for checks of a model, from the effect of rounding to bfloat16 on its outputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from nemo_rl_core.config.model import DType

_EXACT = 1e-3


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

    In bfloat16 it is measured: each layer's output is rounded to two bits less than bfloat16 has.
    A pass in float32 would need weights that FSDP2 gathers in bfloat16 only. Over Llama, Qwen3 and
    Mixtral of 2 to 30 layers, the coarser rounding changes logprobs by 0.5 to 3.6 times as much as
    bfloat16 does against float32, so twice its effect bounds the difference of two kernels.

    Args:
        read: Returns outputs of a pass, in nats or scores; called twice in bfloat16, a collective
            if the pass is one.
        layers: The decoder's layers of this rank.
        dtype: Dtype of the matrix products.
    """
    if dtype == "float32":
        return _EXACT
    usual = read()
    with _coarser(layers):
        return _EXACT + 2 * size_of(read() - usual, dtype)


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
