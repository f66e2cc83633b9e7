"""Quantized weights: frozen bitsandbytes weights, and dequantization of published FP8 weights."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.distributed.process_group import world_size
from nemo_rl_core.errors import ConfigError, ModelError, ResourceError

Precision = Literal["full", "8bit", "4bit"]
_SCALES = "_scale_inv"
"""Suffix of the scales of DeepSeek's FP8 weights."""


def loading_options(weights: Precision) -> dict[str, Any]:
    """Returns the options of `from_pretrained` for quantization; empty for full weights.

    Four bits are NormalFloat with the quantization constants quantized as well: Dettmers et al.
    (2023), "QLoRA".
    """
    if weights == "full":
        return {}
    if world_size() > 1:
        raise ConfigError(
            f"weights: {weights} cannot be sharded over ranks",
            expected="one rank",
            got=f"{world_size()} ranks",
            fix="set cluster.num_workers to 1, or leave training.weights out",
        )
    require_bitsandbytes(f"weights: {weights}")
    from transformers import BitsAndBytesConfig

    four_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    config = BitsAndBytesConfig(**(four_bits if weights == "4bit" else {"load_in_8bit": True}))
    # Quantized while reading, since such a model cannot be moved afterwards.
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def require_bitsandbytes(setting: str) -> None:
    """Raises `ResourceError` for a recipe's setting if bitsandbytes or a GPU is missing."""
    needed = {
        "package bitsandbytes": find_spec("bitsandbytes") is not None,
        "CUDA device": torch.cuda.is_available(),
    }
    if missing := [name for name, is_present in needed.items() if not is_present]:
        raise ResourceError(
            f"the setting {setting!r} cannot be used here",
            expected="bitsandbytes and a CUDA device",
            got=" and ".join(f"no {name}" for name in missing),
            fix="install bitsandbytes on a machine with a GPU, or leave the setting out",
        )


def dequantized_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and saved buffers in float32, in the order of the model's `state_dict`.

    Quantization metadata is omitted. Only one weight is dequantized at a time.
    """
    from peft.utils.integrations import dequantize_module_weight

    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = set(model.state_dict())
    tensors = {**parameters, **{n: b for n, b in model.named_buffers() if n in saved}}
    for name in [name for name in model.state_dict() if name in tensors]:
        owner, _, leaf = name.rpartition(".")
        tensor = tensors[name]
        if type(tensor).__name__ in {"Params4bit", "Int8Params"} and leaf == "weight":
            tensor = dequantize_module_weight(model.get_submodule(owner))
        yield name, tensor.detach().float()


def dequantized_slices(folder: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """Replaces the FP8 weights of a folder and their scales with float32 weights."""
    if not read_model_json(folder).get("quantization_config"):
        return stored
    refuse_quantized(folder, allowed="fp8")
    weights = {name: each for name, each in stored.items() if not name.endswith(_SCALES)}
    scaled = [name for name in weights if name + _SCALES in stored]
    return weights | {n: _DequantizedSlice(weights[n], stored[n + _SCALES]) for n in scaled}


def refuse_quantized(folder: Path, *, allowed: str | None = None) -> None:
    """Raises `ModelError` unless a folder's weights are quantized by the method `allowed`.

    None allows only weights that are not quantized.
    """
    declared = read_model_json(folder).get("quantization_config") or {}
    method = declared.get("quant_method")
    if method != allowed:
        raise ModelError(
            f"the quantized weights of {folder.name!r} cannot be read here",
            expected="weights that are not quantized"
            + (f", or quant_method: {allowed}" if allowed else ""),
            got=f"quant_method: {method}",
            fix="write a float32 copy with nemo_rl_core.converters.materialize.materialize",
        )


class _DequantizedSlice:
    """A safetensors slice of an FP8 weight with its scales; always reads the full weight."""

    def __init__(self, weight: Any, scales: Any) -> None:
        self._weight, self._scales = weight, scales
        self.get_shape = weight.get_shape

    def __getitem__(self, part: Any) -> torch.Tensor:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        dequantize = Fp8Dequantize(None)._dequantize_one
        weight: torch.Tensor = dequantize(self._weight[...], self._scales[...], torch.float32)
        return weight[part]
