"""Merges a peft adapter into its base model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.lora import merged, tied_head
from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.checkpoints.weight_files import first_names
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.converters.folders import StoredWeights, new_folder, require_folder
from nemo_rl_core.data.pretrained import copy_description, read_model_json
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import empty_model
from nemo_rl_core.model_files.weights import check_folder, match_stored, plain_name, plain_weights

_PEFT = "base_model.model."
_HALVES = ("lora_A", "lora_B")
# Options of peft's LoraConfig that do not affect the merged weights, given the tensors. As in peft,
# the class of a layer decides whether it is stored transposed, not `fan_in_fan_out`.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
}
_READ = {"lora_alpha", "peft_type", "r", "use_rslora"}
# Other initializations change the base's weights before training.
_PLAIN_INITIALIZATIONS = ("gaussian", "orthogonal")


def merge_lora(
    adapter: Path, base: Path, target: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> int:
    """Writes `W + scaling * B A` for every adapted weight, and all others unchanged.

    `scaling` is `alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`. Computed in float32, as
    in the trainer, and stored in the dtype of the base's tensor. Only the adapter and the tensors
    of one file are in memory at a time. Returns the number of adapted weights.

    Args:
        adapter: Folder with peft's `adapter_config.json` and `adapter_model.safetensors`.
        base: Transformers folder of the model that the adapter was trained on.
    """
    from safetensors.torch import load_file

    require_folder(adapter, "adapter_config.json", "adapter_model.safetensors")
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    _require_plain_lora(adapter, config)
    if method := read_model_json(base).get("quantization_config"):
        raise ModelError(
            f"the weights of {base} are quantized, and an adapter cannot be added to them",
            expected="a base in float32, float16 or bfloat16",
            got=f"quant_method: {method.get('quant_method')}",
            fix="save the base without quantization, and merge the adapter into that",
        )
    rank = int(config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    require_finite(f"the adapter {adapter}", tensors.items())
    adapters = {name.removeprefix(_PEFT): tensor for name, tensor in tensors.items()}
    model = empty_model(base, "lm")
    check_folder(model, base)
    stored = StoredWeights(base)
    adapted, transposed = _adapted(adapters, model, stored, rank=rank)
    with new_folder(target) as folder:
        copy_description(base, folder)
        weights = merged(
            _weights_with_adapters(stored, adapters, adapted),
            adapted=adapted,
            scaling=float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank),
            transposed=transposed,
        )
        typed = ((name, tensor.to(stored.dtype(name))) for name, tensor in weights)
        save_weights(folder, typed, max_shard_bytes=max_shard_bytes)
    return len(adapted)


def _require_plain_lora(adapter: Path, config: Mapping[str, Any]) -> None:
    from peft import LoraConfig

    plain: dict[str, Any] = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    # Naming a linear layer's weight is the same as naming the layer.
    others = [n for n in config.get("target_parameters") or () if not n.endswith(".weight")]
    wrong = {
        name: value
        for name, value in {**config, "target_parameters": others}.items()
        if value and name not in _WITHOUT_EFFECT | _READ and value != plain.get(name)
    }
    if wrong.get("init_lora_weights") in _PLAIN_INITIALIZATIONS:
        del wrong["init_lora_weights"]
    if config.get("peft_type") != "LORA":
        wrong = {"peft_type": config.get("peft_type"), **wrong}
    if wrong:
        raise ModelError(
            f"the adapter {adapter} cannot be merged",
            expected="plain LoRA of linear layers: W + scaling * B A",
            got=", ".join(f"{name}={value}" for name, value in wrong.items())[:200],
            fix="try peft's own merge_and_unload",
        )


def _adapted(
    adapters: Mapping[str, torch.Tensor], model: Any, stored: StoredWeights, *, rank: int
) -> tuple[dict[str, str], set[str]]:
    """Returns the stored names of the adapted weights by layer, and the transposed ones.

    With an adapter of the head, peft also writes the head's weight.
    """
    from transformers.pytorch_utils import Conv1D

    described = {name: torch.empty(0, device="meta") for name in stored.names}
    sources, _, _ = match_stored(model, plain_weights(model), described)
    conv = {name for name, part in model.named_modules() if isinstance(part, Conv1D)}
    first, second = (f".{half}.weight" for half in _HALVES)
    layers = {name.removesuffix(first) for name in adapters if name.endswith(first)}
    if (tied := tied_head(model)) in layers:
        raise ModelError(
            "the adapter of the head would change the embedding, which shares its weight",
            expected="an adapter without the head, or a base whose embedding has its own weight",
            got=f"an adapter of {tied}",
            fix="save the base with tie_word_embeddings: false, and merge the adapter into it",
        )
    adapted: dict[str, str] = {}
    for layer in layers:
        # A layer's experts are stored as one fused weight.
        name = sources.get(f"{layer}.weight", f"{layer}.weight")
        if name in stored.names:
            shape = stored.shape(name)[:: -1 if layer in conv else 1]
            down, up = (adapters.get(layer + half, torch.empty(0)) for half in (first, second))
            if (*up.shape, *down.shape) == (shape[0], rank, rank, *shape[1:]):
                adapted[layer] = name
    halves = {layer + half for layer in adapted for half in (first, second)}
    copies = {
        name
        for name, tensor in adapters.items()
        if (source := sources.get(plain_name(name)))
        and torch.equal(tensor, stored.read(source).to(tensor.dtype))
    }
    unexpected = adapters.keys() - halves - copies
    if unexpected or not adapted:
        raise ModelError(
            "the adapter does not belong to the base",
            expected=f"lora_A [{rank}, in] and lora_B [out, {rank}] of linear layers of the base",
            got=f"unexpected: {first_names(sorted(unexpected)) or 'none'}",
            fix="name the model that the adapter was trained on; if it adapts other layers, "
            "merge it with peft's own merge_and_unload",
        )
    return adapted, {adapted[layer] for layer in conv & adapted.keys()}


def _weights_with_adapters(
    stored: StoredWeights, adapters: Mapping[str, torch.Tensor], adapted: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    layer_of = {weight: layer for layer, weight in adapted.items()}
    for name in stored.names:
        tensor = stored.read(name)
        if (layer := layer_of.get(name)) is None:
            yield name, tensor
        else:
            yield name, tensor.float()
            for half in _HALVES:
                yield f"{layer}.{half}.weight", adapters[f"{layer}.{half}.weight"].float()
