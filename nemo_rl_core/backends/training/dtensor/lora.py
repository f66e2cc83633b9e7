"""Low-rank adapters over frozen weights with `peft`: training, merging, saving, disabling."""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_core.backends.training.dtensor.parallelize import full_tensor
from nemo_rl_core.checkpoints.model_code import copy_code
from nemo_rl_core.checkpoints.tensors import save_tensors
from nemo_rl_core.config.training import Head, LoRAConfig
from nemo_rl_core.data.pretrained import HUB_NAME, base_names
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import ConfigError, StoreError
from nemo_rl_core.model_files.loading import SCALAR_HEAD, finish_loading, load_model
from nemo_rl_core.model_files.quantized import Precision
from nemo_rl_core.model_files.weights import (
    fill_from_folder,
    placeholder_weights,
    plain_name,
    replace_quantized,
)
from nemo_rl_core.planning.model_parts import adaptable_layers
from nemo_rl_core.store.files import hash_file

_ADAPTER = "default"
_PUBLISHED_PARTS = {"laguna": (".shared_experts.", ".shared_expert.")}
"""Parts of names to save as published, since peft would rename the model's names again."""


class Adapters:
    """The adapters of one model: `W + alpha / rank * B A` for every targeted `W`.

    `B` starts as zeros, so that the model's outputs are unchanged. All weights of the model are
    frozen except a scalar head, which is usually new and fully trained.
    """

    def __init__(
        self, model: Any, config: LoRAConfig, *, base_folder: Path, weights: Precision = "full"
    ) -> None:
        from peft import LoraConfig, TaskType, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._model, self._base_folder, self._weights = model, base_folder, weights
        self._scaling = config.alpha / config.rank
        head = getattr(model, SCALAR_HEAD, None)
        layers, parameters = adapter_targets(model, config)
        self._config = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it; any number is valid
            target_modules=layers,
            target_parameters=parameters or None,
            task_type=TaskType.CAUSAL_LM if head is None else TaskType.SEQ_CLS,
        )
        try:
            with placeholder_weights(model):  # peft creates adapters on the weights' device
                inject_adapter_in_model(self._config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(
                "the adapters do not fit the model",
                expected="lora.target_modules with names of linear layers, or all-linear",
                got=str(error)[:200],
                fix="correct lora.target_modules",
            ) from error
        if head is not None:
            head.requires_grad_(True)
        tuner_layers = {
            n: part for n, part in model.named_modules() if isinstance(part, BaseTunerLayer)
        }
        self._layers = list(tuner_layers.values())
        self._adapted = {
            name: plain_name(f"{name}.base_layer.{getattr(part, 'parameter_name', 'weight')}")
            for name, part in tuner_layers.items()
        }
        self._transposed = {
            self._adapted[name]
            for name, part in tuner_layers.items()
            if getattr(part, "fan_in_fan_out", False)
            or getattr(part.get_base_layer(), "is_transposed", False)
        }

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """All trained parameters (adapters and scalar head) by name, sharded or not."""
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which adapters are disabled; not for training."""
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)

    def merged(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the merged weights under plain names, one at a time; see the function `merged`."""
        return merged(
            named_tensors,
            adapted=self._adapted,
            scaling=self._scaling,
            transposed=self._transposed,
        )

    def save(self, folder: Path) -> None:
        """Writes `adapter/` in peft's format; every rank calls this, and rank 0 writes."""
        old, new = _PUBLISHED_PARTS.get(self._model.config.model_type, ("", ""))
        tensors = {}
        for name, parameter in self.trained.items():
            full = parameter.detach()
            if isinstance(parameter, DTensor):
                full = full_tensor(parameter, parameter.dtype)
            published = name.replace(f".{_ADAPTER}.", ".").replace(old, new)
            tensors[f"base_model.model.{published}"] = full
        if rank() != 0:
            return
        adapter = folder / "adapter"
        adapter.mkdir()
        save_tensors(adapter / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
        adapter_config: dict[str, Any] = self._config.to_dict()  # type: ignore[no-untyped-call]
        adapter_config |= {"inference_mode": True, **base_names(self._base_folder)}
        if hasattr(self._model, SCALAR_HEAD):
            adapter_config["modules_to_save"] = [SCALAR_HEAD]
        (adapter / "adapter_config.json").write_text(
            json.dumps(adapter_config, indent=1, sort_keys=True, default=sorted)
        )

    def save_base(self, folder: Path) -> None:
        """Writes `base/` with the frozen weights, on rank 0; files are hard-linked if possible.

        A resumed run needs them, since the base cannot be recovered exactly from merged weights.
        """
        if rank() != 0:
            return
        base = folder / "base"
        base.mkdir()
        patterns = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
        for path in {path for pattern in patterns for path in self._base_folder.glob(pattern)}:
            _link(path, base / path.name)
        copy_code(self._base_folder, base)
        names = base_names(self._base_folder)
        if names["revision"] and not (base / HUB_NAME).exists():
            (base / HUB_NAME).write_text(json.dumps(names))

    def has_same_base(self, folder: Path) -> bool:
        """Returns whether a folder has the base weights of the adapters."""
        ours, theirs = self._base_folder, folder
        for base in (ours, theirs):
            if not base.is_dir():
                raise StoreError(
                    "the base weights of the adapters cannot be compared",
                    expected=f"a transformers folder at {base}",
                    got="no such folder",
                    fix="restore trainer/base of the checkpoint (the model that the adapters were "
                    "trained on), or start a new run",
                )
        if ours.samefile(theirs):
            return True
        names = _weight_files(ours)
        return names == _weight_files(theirs) and all(
            (ours / name).samefile(theirs / name)
            or hash_file(ours / name) == hash_file(theirs / name)
            for name in names
        )

    def replace_base(self, folder: Path) -> None:
        """Replaces the frozen base weights with those of a folder."""
        if self._weights == "full":
            finish_loading(self._model, fill_from_folder(self._model, folder), folder)
        else:
            head: Head = "scalar" if hasattr(self._model, SCALAR_HEAD) else "lm"
            replace_quantized(self._model, load_model(folder, head, weights=self._weights))
        self._base_folder = folder


def adapter_targets(model: Any, config: LoRAConfig) -> tuple[list[str], list[str]]:
    """Returns peft's target modules and target parameters.

    peft would silently ignore names that match nothing if another name matches. It also treats some
    names of linear layers as experts of older checkpoints, so those layers are targeted by
    parameter.
    """
    head, linear = model.get_output_embeddings(), adaptable_layers(model)
    linear.pop(SCALAR_HEAD, None)  # fully trained
    legacy = {name for name in _last_names(linear) if _is_legacy_expert_name(model, name)}

    def peft_targets(names: list[str]) -> tuple[list[str], list[str]]:
        weights = [name for name in names if name.rpartition(".")[2] in legacy]
        layers = [name for name in names if name.rpartition(".")[2] not in legacy]
        return layers, [f"{name}.weight" for name in weights]

    if config.target_modules == "all-linear":
        return peft_targets([name for name, layer in linear.items() if layer is not head])
    experts = {
        f"{name}.{leaf}"
        for name, part in model.named_modules()
        if name.endswith(".experts")
        for leaf, weight in part.named_parameters(recurse=False)
        if weight.ndim == 3
    }
    # Plain `down_proj` would be ambiguous if some layers are dense, or have shared experts.
    matched = {
        target: [
            name
            for name in (*linear, *(experts if "experts." in target else ()))
            if f".{name}".endswith(f".{target}")
        ]
        for target in config.target_modules
    }
    if unknown := [target for target, names in matched.items() if not names]:
        raise ConfigError(
            "lora.target_modules names layers that the model does not have or cannot train",
            expected="lora.target_modules among "
            f"{', '.join(_last_names(linear) + [f'experts.{n}' for n in _last_names(experts)])}",
            got=", ".join(unknown),
            fix="correct the names, or set lora.target_modules to all-linear",
        )
    names = {name for names in matched.values() for name in names}
    if tied_head(model) in names:
        raise ConfigError(
            "an adapter of the head would change the embedding, which shares its weight",
            expected="lora.target_modules without the head",
            got=", ".join(config.target_modules),
            fix="remove the head, or use a model with tie_word_embeddings: false",
        )
    layers, weights = peft_targets(sorted(names - experts))
    return layers, weights + sorted(names & experts)


def _is_legacy_expert_name(model: Any, name: str) -> bool:
    """Whether peft treats a layer's name as that of experts in transformers 4."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of two weights that transformers 5 merged
        return True
    return name not in (config.target_modules or ())


def tied_head(model: Any) -> str | None:
    """Returns the name of the head if it shares its weight with the embedding."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return None
    return next(str(name) for name, part in model.named_modules() if part is head)


def _last_names(modules: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in modules})


def merged(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    adapted: Mapping[str, str],
    scaling: float,
    transposed: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `W + scaling * B A` for every adapted `W`, and all other weights, under plain names.

    Args:
        named_tensors: Tensors by name, each adapted weight before its `lora_A [r, in]` and
            `lora_B [out, r]`, which have these strings in their names. For experts
            `W [experts, out, in]`, `lora_A [experts * r, in]` and `lora_B [out, r * experts]`.
        adapted: Plain names of the adapted weights by layer, the part of a name before `.lora_A`.
        transposed: Plain names of weights with `in` before `out`, as in GPT-2 and GPT-OSS.
    """
    names = set(adapted.values())
    weights: dict[str, torch.Tensor] = {}
    down = torch.empty(0)
    for name, tensor in named_tensors:
        layer, _, half = name.rpartition(".lora_")
        if not layer and plain_name(name) in names:
            weights[plain_name(name)] = tensor
        elif not layer:
            yield plain_name(name), tensor
        elif half.startswith("A."):
            down = tensor
        else:
            plain = adapted[layer]
            weight = weights.pop(plain)
            if weight.ndim == 3:
                a = down.reshape(len(weight), -1, down.shape[1])
                b = tensor.reshape(len(tensor), -1, len(weight))
                change = torch.einsum("ore,eri->eoi", b, a) * scaling
            else:
                change = (tensor @ down) * scaling
            yield plain, weight + (change.mT if plain in transposed else change)


def _weight_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk, or no support for links
        shutil.copyfile(source, target)
