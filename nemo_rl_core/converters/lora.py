"""Merging of a peft adapter into its base model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.loading import empty_model
from nemo_rl_core.backends.training.dtensor.lora import merged
from nemo_rl_core.backends.training.dtensor.matching import check_folder
from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.converters.folders import StoredWeights, new_folder, require_folder
from nemo_rl_core.data.pretrained import copy_description
from nemo_rl_core.errors import ModelError

_PEFT = "base_model.model."
# Options that change the arithmetic, unless they are None, False or empty.
_NOT_PLAIN = (
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "use_dora",
    "use_rslora",
)


def merge_lora(
    adapter: Path, base: Path, target: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> int:
    """Writes `W + alpha / rank * B A` for every adapted weight, and all others unchanged.

    Computed in float32, as in the trainer, and stored in the dtype of the base's tensor. Memory
    holds the adapter and the tensors of one file.

    Args:
        adapter: `adapter_config.json` and `adapter_model.safetensors`, as peft writes them.
        base: The transformers folder that the adapter was trained over.
        target: A folder that does not exist yet.
        max_shard_bytes: Bound on the size of one safetensors file.

    Returns:
        The number of adapted weights.

    Raises:
        ModelError: If the adapter is not plain LoRA or does not fit the base, or if either has
            weights that are missing, surplus, misshapen or not finite.
        StoreError: If the target exists, or writing fails.
    """
    from safetensors.torch import load_file

    require_folder(adapter, "adapter_config.json", "adapter_model.safetensors")
    scaling = _scaling(adapter)
    adapters = load_file(adapter / "adapter_model.safetensors")
    require_finite(f"the adapter {adapter}", adapters.items())
    check_folder(empty_model(base, "lm"), base)
    stored = StoredWeights(base)
    modules = _modules(adapters, stored)
    with new_folder(target) as folder:
        copy_description(base, folder)
        weights = merged(_interleaved(stored, adapters, modules), scaling=scaling)
        typed = ((name, tensor.to(stored.dtype(name))) for name, tensor in weights)
        save_weights(folder, typed, max_shard_bytes=max_shard_bytes)
    return len(modules)


def _scaling(adapter: Path) -> float:
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    wrong = {name: config[name] for name in _NOT_PLAIN if config.get(name)}
    if config.get("peft_type") != "LORA":
        wrong["peft_type"] = config.get("peft_type")
    if config.get("init_lora_weights") not in (None, True, False, "gaussian"):
        # Other initialisations change the base's weights before training.
        wrong["init_lora_weights"] = config["init_lora_weights"]
    if wrong:
        raise ModelError(
            f"the adapter {adapter} cannot be merged",
            expected="plain LoRA: W + alpha / rank * B A",
            got=", ".join(f"{name}={value}" for name, value in wrong.items())[:200],
            fix="merge it with peft's own merge_and_unload",
        )
    return float(config["lora_alpha"]) / float(config["r"])


def _modules(adapters: dict[str, torch.Tensor], stored: StoredWeights) -> set[str]:
    """Names of the adapted layers; checks that every adapter tensor belongs to one."""
    halves = {
        half: {
            name.removeprefix(_PEFT).removesuffix(f".{half}.weight")
            for name in adapters
            if name.startswith(_PEFT) and name.endswith(f".{half}.weight")
        }
        for half in ("lora_A", "lora_B")
    }
    modules = halves["lora_A"] & halves["lora_B"]
    known = {module for module in modules if f"{module}.weight" in stored.names}
    if 2 * len(known) != len(adapters) or not known:
        unexpected = sorted(modules - known) or sorted(
            name for name in adapters if not any(module in name for module in known)
        )
        raise ModelError(
            "the adapter does not belong to the base",
            expected="lora_A and lora_B of weights that the base has",
            got=f"{len(adapters)} tensors, for {len(known)} weights of the base; unexpected: "
            f"{', '.join(unexpected[:3]) or 'none'}",
            fix="name the model that the adapter was trained over",
        )
    return known


def _interleaved(
    stored: StoredWeights, adapters: dict[str, torch.Tensor], modules: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in stored.names:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in modules:
            yield f"{module}.base_layer.weight", stored.read(name).float()
            for half in ("lora_A", "lora_B"):
                yield f"{module}.{half}.weight", adapters[f"{_PEFT}{module}.{half}.weight"].float()
        else:
            yield name, stored.read(name)
