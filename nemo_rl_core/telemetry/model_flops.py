"""FLOPs of a model per token, from its config and the headers of its files.

They are the FLOPs that the model needs, as in appendix B of PaLM (https://arxiv.org/abs/2204.02311):
`2 N` per token forward and `4 N` backward for the `N` weights in matrix products, and for attention
the products `QKᵀ` and weights times `V`, only over the causal half. Recomputation does not count,
so it lowers MFU. Both costs and the packing of shared prefixes use them. Packing affects the order
of sums, so this module is part of every training's key, unlike `cost`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Phase = Literal["training", "scoring", "generation"]
"""Forward and backward pass; one forward pass; forward token by token."""

_PASSES: dict[Phase, int] = {"training": 3, "scoring": 1, "generation": 1}
"""FLOPs in units of a forward pass; a backward pass is two."""


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model that determine its FLOPs.

    Attributes:
        num_multiplied: Number of weights in matrix products per token, without embedding tables
            and inactive experts.
        num_layers: Number of attention layers.
        attention_width: Number of heads times head size.

    Example:
        >>> ModelFlops(num_multiplied=100, num_layers=2, attention_width=8).flops("scoring", [3])
        984.0
    """

    num_multiplied: float
    num_layers: int
    attention_width: int

    @property
    def pairs_per_token(self) -> float:
        """Cost of a token besides attention, in units of the attention of one pair of tokens."""
        return self.num_multiplied / (2.0 * self.num_layers * self.attention_width)

    def flops(
        self, phase: Phase, lengths: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]"
    ) -> float:
        """Returns the FLOPs of complete causal sequences of these lengths, including prompts."""
        import numpy as np

        num_tokens = np.asarray(lengths, np.int64)
        # 4 · width · context per token and layer, contexts 1 to length
        num_contexts = int((num_tokens * (num_tokens + 1)).sum())
        pairs = 2.0 * self.num_layers * self.attention_width * num_contexts
        return _PASSES[phase] * (2.0 * self.num_multiplied * int(num_tokens.sum()) + pairs)


@cache
def model_shape(folder: Path) -> ModelFlops:
    """Reads the sizes of a model in the transformers layout from config and file headers."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    # Models with other keys count without attention, since accounting must not end a run.
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 0)
    width = heads * (config.get("head_dim") or hidden // max(heads, 1))
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    share = config.get("num_experts_per_tok", num_experts) / num_experts
    multiplied, tables = 0.0, []
    for name, shape in _shapes(folder).items():
        multiplied += prod(shape) * (share if ".experts." in name else 1)
        if len(shape) == 2 and shape[0] == config.get("vocab_size"):
            tables.append(prod(shape))
    # One table over the vocabulary is the head, which is multiplied; the others are looked up.
    multiplied -= sum(sorted(tables)[1:])
    return ModelFlops(multiplied, config.get("num_hidden_layers", 0), width)


def num_parameters(folder: Path) -> int:
    """Returns the number of weights in the files of a model."""
    return sum(map(prod, _shapes(folder).values()))


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tensor["shape"] for name, tensor in header.items()}
    return shapes
