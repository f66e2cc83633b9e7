"""Quantized weights: frozen bitsandbytes weights, and dequantization of published FP8 weights."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_core.config.training import require_bitsandbytes
from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.errors import ModelError

Precision = Literal["full", "8bit", "4bit"]
_SCALES = "_scale_inv"
"""Suffix of the scales of DeepSeek's FP8 weights."""

# It recommends the package kernels, for products that are not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def loading_options(folder: Path, weights: Precision) -> dict[str, Any]:
    """Returns the options of `from_pretrained` for quantization; empty for full weights.

    Four bits are NormalFloat with the quantization constants quantized as well: Dettmers et al.
    (2023), "QLoRA".
    """
    if weights == "full":
        return {}
    require_bitsandbytes(f"training.weights: {weights}")
    refuse_quantized(folder)
    from transformers import BitsAndBytesConfig

    four_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    config = BitsAndBytesConfig(**(four_bits if weights == "4bit" else {"load_in_8bit": True}))
    # Quantized while reading, since such a model cannot be moved afterwards.
    return {"quantization_config": config, "device_map": {"": str(local_device())}}


def compute_dequantized(model: Any) -> None:
    """Makes quantized layers multiply by their dequantized weights, the same on GPUs and CPUs.

    The layers of bitsandbytes would also round activations to 8 bits, or convert the weights for
    some CPUs, so that engines with the dequantized weights would have other logprobs.
    """
    from transformers.pytorch_utils import Conv1D

    layers = quantized_layers(model)
    for layer in layers.values():
        layer.forward = partial(_linear, layer)
        layer.is_transposed = issubclass(layer.source_cls, Conv1D)  # in the folder
        if (state := getattr(layer.weight, "quant_state", None)) is not None:
            # One row: bitsandbytes' CPU kernel reads wrong scales if a block of 64 weights
            # continues in the next row.
            state.shape = torch.Size([1, state.shape.numel()])
    if layers and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # saved weights are dequantized


def dequantized_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and saved buffers in float32, in the order of the model's `state_dict`.

    Quantization metadata is omitted, and tied weights are yielded once. Only one weight is
    dequantized at a time.
    """
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
    saved = model.state_dict()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in [name for name in saved if name in tensors]:
        tensor = tensors[name]
        if name in layers:
            tensor = _dequantized(layers[name])
            tensor = tensor.mT if layers[name].is_transposed else tensor
        yield name, tensor.detach().float()


def quantized_layers(model: Any) -> dict[str, Any]:
    """Returns the layers with quantized weights by name, in the order of the model."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer._parameters.get("weight")).__name__ in {"Params4bit", "Int8Params"}
    }


def _dequantized(layer: Any) -> torch.Tensor:
    from bitsandbytes import functional

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        row: torch.Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
        return row.view(layer.out_features, layer.in_features)
    rows: torch.Tensor = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return rows


class _DequantizedLinear(torch.autograd.Function):
    """A linear layer whose weight is dequantized in both passes, and not kept in between."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(inputs, _dequantized(layer), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ _dequantized(ctx.layer).to(gradient.dtype), None


def _linear(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = _DequantizedLinear.apply(inputs, layer)  # type: ignore[no-untyped-call]
    return outputs


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
