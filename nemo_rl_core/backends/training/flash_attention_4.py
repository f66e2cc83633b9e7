"""The kernels of the package flash-attn-4 as torch 2.13 calls them.

Torch unpacks two results of the forward pass. The package returned two up to 4.0.0b10, four from
4.0.0b20 and five in 4.0.0b36: the others belong to kernels that nothing here calls.
"""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The attended values, and the logarithm of each softmax's sum."""
    attended, log_sums, *_ = interface._flash_attn_fwd(*arguments, **options)
    return attended, log_sums


_flash_attn_bwd = interface._flash_attn_bwd
