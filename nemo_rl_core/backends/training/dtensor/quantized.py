"""Frozen weights in 8 or 4 bits, by bitsandbytes: how they are loaded, and made whole again."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from nemo_rl_core.backends.training.optimizers import require_bitsandbytes


def loading_options(weights: Literal["full", "8bit", "4bit"]) -> dict[str, Any]:
    """What `from_pretrained` is told besides; nothing for full weights.

    Four bits are NormalFloat with the quantization constants quantized as well: Dettmers et al.
    (2023), "QLoRA".

    Raises:
        ResourceError: If bitsandbytes or a GPU is missing; nothing has been loaded then.
    """
    if weights == "full":
        return {}
    require_bitsandbytes(f"weights: {weights}")
    from transformers import BitsAndBytesConfig

    if weights == "8bit":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config}


def dequantized_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters and saved buffers in the order of its `state_dict`, in float32.

    What only says how weights were quantized is left out. One weight is whole at a time.
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
