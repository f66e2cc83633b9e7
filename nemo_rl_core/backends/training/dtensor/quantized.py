"""Loading and dequantization of frozen 8- or 4-bit weights with bitsandbytes."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from nemo_rl_core.backends.training.optimizers import require_bitsandbytes
from nemo_rl_core.distributed.process_group import world_size
from nemo_rl_core.errors import ConfigError

Precision = Literal["full", "8bit", "4bit"]


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
