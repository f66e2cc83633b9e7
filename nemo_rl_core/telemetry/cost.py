"""Costs of work: FLOPs of models, peaks of devices, and prices.

FLOPs are those that the model needs, as in appendix B of PaLM (https://arxiv.org/abs/2204.02311):
`2 N` per token forward and `4 N` backward for the `N` weights in matrix products, and for attention
the products `QKᵀ` and weights times `V`, over the causal half only. Recomputation does not count,
so it lowers MFU.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, NonNegativeFloat, ValidationError

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError

Phase = Literal["training", "scoring", "generation"]
"""Forward and backward; one forward pass; forward token by token."""

_PASSES: dict[Phase, int] = {"training": 3, "scoring": 1, "generation": 1}
"""In units of a forward pass: a backward pass is two."""

_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250e12, "float32": 80e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "RTX 4090": {"bfloat16": 165e12, "float32": 82.6e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "A10G": {"bfloat16": 70e12, "float32": 35e12},
    "A10": {"bfloat16": 125e12, "float32": 31.2e12},
    "T4": {"float32": 8.1e12},
}
"""Dense peaks in FLOP/s from data sheets, by a part of the device's name. CPUs are not listed, as
their peak would have to be measured."""

PRICES = "NEMO_RL_PRICES"
"""The environment variable with the path of a price table; see `Prices`."""


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

    def flops(self, phase: Phase, lengths: Sequence[int]) -> float:
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
    multiplied = 0.0
    for file in folder.glob("*.safetensors"):
        for name, count in _num_weights(file).items():
            is_lookup = name.endswith("embed_tokens.weight") and not config.get(
                "tie_word_embeddings", False
            )
            multiplied += 0 if is_lookup else count * (share if ".experts." in name else 1)
    return ModelFlops(multiplied, config.get("num_hidden_layers", 0), width)


def num_parameters(folder: Path) -> int:
    """How many weights the files of a model have."""
    return sum(sum(_num_weights(file).values()) for file in folder.glob("*.safetensors"))


def _num_weights(file: Path) -> dict[str, int]:
    """Number of weights by tensor, from the header of a safetensors file."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    sizes = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            sizes[name] = count
    return sizes


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device; None if it is not in the table."""
    for name, peaks in _PEAKS.items():
        if all(part in device for part in name.split()):
            return peaks.get(dtype)
    return None


def model_flops_utilization(
    flops: float, *, gpu_seconds: float, device: str, dtype: str
) -> float | None:
    """Model FLOPs utilization (MFU), 0 to 1; None if the peak is unknown."""
    peak = peak_flops(device, dtype)
    return None if peak is None or not gpu_seconds else flops / (gpu_seconds * peak)


class Prices(FrozenConfig):
    """Prices per hour; a missing price is unknown, and then the total is unknown too.

    They are in a YAML file that `NEMO_RL_PRICES` names, such as
    `{currency: USD, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}`. Prices are not part of a recipe:
    another price makes nothing run again.

    Attributes:
        currency: Name of the currency.
        cpu_core_hour: Price of one core, for CPU time.
        gpu_hour: Price of a GPU by a part of its name, for the time that a stage holds it.
    """

    currency: str = "USD"
    cpu_core_hour: NonNegativeFloat | None = None
    gpu_hour: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> "Prices | None":
        """Reads the price table that `NEMO_RL_PRICES` names; None without one.

        Raises:
            ConfigError: If it cannot be read.
        """
        path = os.environ.get(PRICES)
        if not path:
            return None
        try:
            return cls.model_validate(yaml.safe_load(Path(path).read_text()) or {})
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ConfigError(
                f"the price table {path!r} cannot be read",
                expected="YAML such as {currency: USD, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}",
                got=str(error).splitlines()[0],
                fix=f"correct the file, or unset {PRICES}",
            ) from error

    def total(self, *, cpu_seconds: float, gpu_seconds: float, device: str) -> float | None:
        """Returns the price of these seconds; None if one of the prices is unknown."""
        gpu = next((price for name, price in self.gpu_hour.items() if name in device), None)
        if self.cpu_core_hour is None or (gpu_seconds and gpu is None):
            return None
        return (cpu_seconds * self.cpu_core_hour + gpu_seconds * (gpu or 0.0)) / 3600


@cache
def gpu_name() -> str:
    """Name of this machine's first GPU; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()
