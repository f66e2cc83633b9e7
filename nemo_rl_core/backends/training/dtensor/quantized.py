"""Quantized weights: frozen ones of bitsandbytes, and dequantization of published FP8."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_core.backends.training.optimizers import require_bitsandbytes
from nemo_rl_core.data.pretrained import described
from nemo_rl_core.distributed.process_group import world_size
from nemo_rl_core.errors import ConfigError, ModelError

Precision = Literal["full", "8bit", "4bit"]
_SCALES = "_scale_inv"
"""End of the name of an FP8 weight's scales, as DeepSeek publishes them."""


def loading_options(weights: Precision) -> dict[str, Any]:
    """Options of `from_pretrained` for quantization; empty for full weights.

    Four bits are NormalFloat with the quantization constants quantized as well: Dettmers et al.
    (2023), "QLoRA".

    Raises:
        ResourceError: If bitsandbytes or a GPU is missing, before loading.
        ConfigError: If there are several ranks.
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
    # Quantized while reading: such a model cannot be moved afterwards.
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def dequantized_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters and saved buffers in the order of its `state_dict`, in float32.

    Quantization metadata is left out. Only one weight is dequantized at a time.
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
    """Replaces the FP8 weights of a folder, and their scales, by float32 weights.

    Args:
        folder: A transformers folder, quantized or not.
        stored: Its safetensors slices by name.

    Raises:
        ModelError: If the folder is quantized by another method.
    """
    if not described(folder).get("quantization_config"):
        return stored
    refuse_quantized(folder, but="fp8")
    weights = {name: each for name, each in stored.items() if not name.endswith(_SCALES)}
    scaled = [name for name in weights if name + _SCALES in stored]
    return weights | {n: _DequantizedSlice(weights[n], stored[n + _SCALES]) for n in scaled}


def refuse_quantized(folder: Path, *, but: str | None = None) -> None:
    """Raises if the weights of a folder are quantized, as backends that read slices cannot be.

    Args:
        folder: A transformers folder.
        but: A method that is taken.

    Raises:
        ModelError: Names the method.
    """
    declared = described(folder).get("quantization_config") or {}
    method = declared.get("quant_method")
    if method != but:
        raise ModelError(
            f"the quantized weights of {folder.name!r} cannot be read here",
            expected="weights that are not quantized"
            + (f", or quant_method: {but}" if but else ""),
            got=f"quant_method: {method}",
            fix="use a float32 copy: nemo_rl_core.converters.materialize.materialize writes one",
        )


class _DequantizedSlice:
    """An FP8 weight with its scales, as a safetensors slice; a part needs the complete weight."""

    def __init__(self, weight: Any, scales: Any) -> None:
        self._weight, self._scales = weight, scales
        self.get_shape = weight.get_shape

    def __getitem__(self, part: Any) -> torch.Tensor:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        dequantize = Fp8Dequantize(None)._dequantize_one
        weight: torch.Tensor = dequantize(self._weight[...], self._scales[...], torch.float32)
        return weight[part]
