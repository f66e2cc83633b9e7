"""Converts a transformers folder into one that vLLM can load."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from nemo_rl_core.checkpoints.model_code import described_config, refuse_conversion
from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.checkpoints.weights import Shape, require_finite
from nemo_rl_core.config.model import DType
from nemo_rl_core.converters.folders import StoredWeights, new_folder, require_folder
from nemo_rl_core.data.pretrained import copy_description, load_tokenizer, stop_token_ids
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import empty_model, name_in_errors
from nemo_rl_core.model_files.weights import check_weights

_PICKLES = "pytorch_model*.bin"


def vllm_ready(
    model_folder: Path,
    target: Path,
    *,
    dtype: DType = "bfloat16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """Writes config, generation config, tokenizer with template, and safetensors of one dtype.

    Returns the number of tensors. Older `pytorch_model*.bin` are read with torch's restricted
    unpickler; tensors that are not floating-point keep their dtype.
    """
    require_folder(model_folder, "config.json")
    refuse_conversion(model_folder)
    _refuse_architecture(model_folder)
    tokenizer = load_tokenizer(model_folder)
    stop_token_ids(model_folder, tokenizer)
    shapes, tensors = _tensors(model_folder)
    _refuse_short_vocabulary(model_folder, len(tokenizer))
    check_weights(empty_model(model_folder, "lm"), shapes, name_in_errors(model_folder))
    torch_dtype = getattr(torch, dtype)
    typed = (
        (name, tensor.to(torch_dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in tensors
    )
    with new_folder(target) as folder:
        copy_description(model_folder, folder, dtype=dtype)
        save_weights(folder, typed, max_shard_bytes=max_shard_bytes)
    return len(shapes)


def _refuse_architecture(folder: Path) -> None:
    declared = json.loads((folder / "config.json").read_text()).get("architectures") or []
    if not declared or not str(declared[0]).endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise ModelError(
            f"vLLM cannot generate with the model {folder.name!r}",
            expected="a class ...ForCausalLM in architectures of config.json",
            got=", ".join(declared) or "none",
            fix="name a policy; a reward model or critic has no language-model head",
        )
    if importlib.util.find_spec("vllm") is None:
        return
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    if declared[0] not in supported:
        raise ModelError(
            f"the installed vLLM does not support the architecture of {folder.name!r}",
            expected=f"one of its {len(supported)} architectures",
            got=declared[0],
            fix="install a vLLM version that supports it, or train another type of model",
        )


def _tensors(folder: Path) -> tuple[dict[str, Shape], Iterator[tuple[str, torch.Tensor]]]:
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} contains an adapter",
            expected="a complete model",
            fix="merge it first: nemo-rl convert lora ADAPTER NEW --model BASE",
        )
    pickles = sorted(folder.glob(_PICKLES))
    if pickles and not list(folder.glob("*.safetensors")):
        opened = [
            torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in pickles
        ]
        weights = {name: tensor for part in opened for name, tensor in part.items()}
        if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        require_finite(name_in_errors(folder), weights.items())
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}, iter(
            weights.items()
        )
    stored = StoredWeights(folder)
    shapes = {name: stored.shape(name) for name in stored.names}
    return shapes, ((name, stored.read(name)) for name in stored.names)


def _refuse_short_vocabulary(folder: Path, num_tokens: int) -> None:
    rows = described_config(folder).get_text_config().vocab_size
    if num_tokens > rows:
        raise ModelError(
            f"the tokenizer of {folder.name!r} has tokens that the model does not",
            expected=f"{rows} tokens at most",
            got=str(num_tokens),
            fix="name a folder whose tokenizer belongs to its model",
        )
