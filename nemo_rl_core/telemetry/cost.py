"""What work costs: floating-point operations of a model, peaks of devices, and prices.

FLOPs are those that the model needs, as in appendix B of PaLM (https://arxiv.org/abs/2204.02311):
`2 N` a token forward and `4 N` backward for the `N` weights that are multiplied by, and for
attention the two products of `QKᵀ` and of its weights with `V`, counted over the causal half alone.
Work that is done twice to save memory does not count, so that MFU shows it as a loss.
"""

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, NonNegativeFloat, ValidationError

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError

Phase = Literal["training", "scoring", "generation"]
"""Forward and backward; forward; forward token by token."""

_PASSES: dict[Phase, int] = {"training": 3, "scoring": 1, "generation": 1}
"""In units of a forward pass: a backward pass is two."""

_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250e12, "float32": 80e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "A10": {"bfloat16": 125e12, "float32": 31.2e12},
}
"""Dense peaks in FLOP/s out of the makers' data sheets, by a part of the device's name. A CPU has
none: its peak would have to be measured."""

PRICES = "NEMO_RL_PRICES"
"""The environment variable with the path of a price table; see `Prices`."""


@dataclass(frozen=True)
class ModelFlops:
    """What of a model its FLOPs depend on.

    Attributes:
        num_multiplied: Weights that each token is multiplied by: all but a table of embeddings
            that is only looked up, and of a mixture's experts those that a token is sent to.
        num_layers: Those with attention.
        attention_width: Heads times their size.

    Example:
        >>> ModelFlops(num_multiplied=100, num_layers=2, attention_width=8).flops("scoring", [3])
        984.0
    """

    num_multiplied: float
    num_layers: int
    attention_width: int

    def flops(self, phase: Phase, lengths: Iterable[int]) -> float:
        """Of whole causal sequences of these lengths, prompts included."""
        forward = sum(
            2.0 * self.num_multiplied * length
            # 4 · width · context a token and layer, contexts 1 to length
            + 2.0 * self.num_layers * self.attention_width * length * (length + 1)
            for length in lengths
        )
        return _PASSES[phase] * forward


@cache
def model_shape(folder: Path) -> ModelFlops:
    """The shape of a model in the transformers layout, from its config and its files' headers."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    # Models that say it otherwise count without attention: a sum must not end a run.
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


def _num_weights(file: Path) -> dict[str, int]:
    """Weights by tensor, out of the header of a safetensors file."""
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
    """What a device can do at most, in FLOP/s; None for one that is not in the table."""
    for name, peaks in _PEAKS.items():
        if all(word in device for word in name.split()):
            return peaks.get(dtype)
    return None


def model_flops_utilization(
    flops: float, *, gpu_seconds: float, device: str, dtype: str
) -> float | None:
    """The share of what the GPUs could have done meanwhile; None where no peak is known."""
    peak = peak_flops(device, dtype)
    return None if peak is None or not gpu_seconds else flops / (gpu_seconds * peak)


class Prices(FrozenConfig):
    """What an hour costs; what is left out is not known, and then there is no sum either.

    A YAML file that `NEMO_RL_PRICES` names, such as
    `{currency: USD, cpu_core_hour: 0.04, gpu_hour: {H100: 2.5}}`. Prices are no part of a recipe:
    another price makes nothing run again.

    Attributes:
        currency: A word to show.
        cpu_core_hour: Of one core, for the seconds that processes have computed.
        gpu_hour: By a part of the device's name, for the seconds that a stage has held it.
    """

    currency: str = "USD"
    cpu_core_hour: NonNegativeFloat | None = None
    gpu_hour: dict[str, NonNegativeFloat] = Field(default_factory=dict)

    @classmethod
    def here(cls) -> "Prices | None":
        """The table of this process's environment, if it names one.

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

    def of(self, *, cpu_seconds: float, gpu_seconds: float, device: str) -> float | None:
        """What these seconds cost; None where one of the prices is not known."""
        gpu = next((price for name, price in self.gpu_hour.items() if name in device), None)
        if self.cpu_core_hour is None or (gpu_seconds and gpu is None):
            return None
        return (cpu_seconds * self.cpu_core_hour + gpu_seconds * (gpu or 0.0)) / 3600


@cache
def gpu_name() -> str:
    """The kind of this machine's first GPU; empty where the driver names none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()
