"""Context parallelism for Megatron's local layers, which compute one rank's part of a row.

Queries stay on their rank; attention gathers the keys and values of the whole row, as in the
dtensor backend. If Transformer Engine is installed, its ring attention is used instead.
"""

from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

from nemo_rl_core.backends.training.context_parallel import whole_rows


class AttentionToWholeRows(DotProductAttention):  # type: ignore[misc]
    """Local attention of this rank's queries to the keys and values of all context ranks.

    Its mask is `[R, 1, L / ranks, L]`, True where attention is forbidden.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        alone = copy(config)
        alone.context_parallel_size = (
            1  # else refused, although `forward` handles context parallelism
        )
        super().__init__(alone, *args, **options)
        self.config = config

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """`[L / ranks, R, H E]` of query, key and value `[L / ranks, R, H, E]`."""
        group = parallel_state.get_context_parallel_group()
        key, value = (whole_rows(part, group, dim=0) for part in (key, value))
        attended: torch.Tensor = super().forward(query, key, value, *args, **options)
        return attended


def attend_to_whole_rows(block_spec: Any) -> None:
    """Uses `AttentionToWholeRows` in every layer of a specification of local layers."""
    for layer in block_spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = AttentionToWholeRows
