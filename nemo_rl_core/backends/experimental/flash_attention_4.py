"""Kernels of the package flash-attn-4 with the signatures that torch 2.13 calls.

Torch unpacks two results of the forward pass. The package returned two up to 4.0.0b10, four from
4.0.0b20 and five in 4.0.0b36; the others belong to kernels that are not called here.
"""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    attended, log_sums, *_ = interface._flash_attn_fwd(*arguments, **options)
    return attended, log_sums


_flash_attn_bwd = interface._flash_attn_bwd
