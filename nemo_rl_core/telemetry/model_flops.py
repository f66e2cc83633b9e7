"""What a model computes for a token, from its config and the headers of its files.

FLOPs are those that the model needs, as in appendix B of PaLM (https://arxiv.org/abs/2204.02311):
`2 N` per token forward and `4 N` backward for the `N` weights in matrix products, and for attention
the products `QKᵀ` and weights times `V`, over the causal half only. Recomputation does not count,
so it lowers MFU. Costs count by them, and so does the packing of shared prefixes, which decides in
which order sums are taken: this module is part of every training's key, and `cost` of none.
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
"""Forward and backward; one forward pass; forward token by token."""

_PASSES: dict[Phase, int] = {"training": 3, "scoring": 1, "generation": 1}
"""In units of a forward pass: a backward pass is two."""


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model that determine its FLOPs.

    Attributes:
        num_multiplied: Weights in matrix products per token: all except an embedding table that is
            only looked up, and of a mixture of experts only the active ones.
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
        """What a token costs besides attention, in pairs of tokens of which attention costs it.

        A pair takes `4 · width` FLOPs a layer, one product for its score and one for its value.
        """
        return self.num_multiplied / (2.0 * self.num_layers * self.attention_width)

    def flops(
        self, phase: Phase, lengths: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]"
    ) -> float:
        """FLOPs of complete causal sequences of these lengths, prompts included."""
        import numpy as np

        each = np.asarray(lengths, np.int64)
        # 4 · width · context per token and layer, contexts 1 to length
        pairs = 2.0 * self.num_layers * self.attention_width * int((each * (each + 1)).sum())
        return _PASSES[phase] * (2.0 * self.num_multiplied * int(each.sum()) + pairs)


@cache
def model_shape(folder: Path) -> ModelFlops:
    """Reads the sizes of a model in the transformers layout from config and file headers."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    # Models with other keys count without attention: accounting must not end a run.
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 0)
    width = heads * (config.get("head_dim") or hidden // max(heads, 1))
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    share = config.get("num_experts_per_tok", num_experts) / num_experts
    multiplied, tables = 0.0, []
    for name, shape in _shapes(folder).items():
        multiplied += prod(shape) * (share if ".experts." in name else 1)
        if len(shape) == 2 and shape[0] == config.get("vocab_size"):
            tables.append(prod(shape))
    # By one of its tables of all tokens, the head, a model multiplies; it looks up in the others.
    multiplied -= sum(sorted(tables)[1:])
    return ModelFlops(multiplied, config.get("num_hidden_layers", 0), width)


def num_parameters(folder: Path) -> int:
    """How many weights the files of a model have."""
    return sum(map(prod, _shapes(folder).values()))


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors, from the headers of the safetensors files."""
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tensor["shape"] for name, tensor in header.items()}
    return shapes
