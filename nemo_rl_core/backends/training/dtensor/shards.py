"""Weights read from safetensors files, of which each rank takes the slices that it keeps.

A model that several ranks share is made without weights (its parameters are on torch's meta
device), spread as it is, given memory for each rank's shards alone, and filled from the files. So
no rank holds more than its shards and the tensor that is being read: a slice, or, where
transformers keeps several published tensors as one (the experts of a layer), that one whole.
Weights drawn from a config are no case of their own: the stage that draws them writes a folder.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from nemo_rl_core.errors import ModelError

BASE_LAYER = ".base_layer."
"""Stands in the names of weights that have adapters."""
_ADAPTER = ".lora_"


def plain_name(name: str) -> str:
    """What a weight is called in the model without adapters."""
    return name.replace(BASE_LAYER, ".")


def allocate(model: Any, device: torch.device) -> None:
    """Gives memory on a device to parameters that have none, shared ones staying shared.

    What they hold is undefined until they are filled; all else stays as it is.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # FSDP2 takes up other parameters than those it was given in this method alone.
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


@contextmanager
def standing_in(model: Any) -> Iterator[None]:
    """Within it, parameters without memory are zeros on the CPU, which take none either.

    For code that puts new parameters beside old ones, on the old ones' device. Whether they take
    gradients may be changed within.
    """
    empty: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    stand_ins: dict[int, torch.nn.Parameter] = {
        id(parameter): torch.nn.Parameter(torch.zeros(()).expand(parameter.shape))
        for _, _, parameter in empty
    }
    for parameters, name, parameter in empty:
        parameters[name] = stand_ins[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in empty:
            parameters[name] = parameter.requires_grad_(parameters[name].requires_grad)


@torch.no_grad()
def fill_from_folder(model: Any, folder: Path) -> set[str]:
    """Fills a model, sharded or whole, from a transformers folder; adapters stay as they are.

    Args:
        model: Loaded by transformers, or with the conversions that it would be loaded with.
        folder: With `model.safetensors`, or several files and their index.

    Returns:
        Names of parameters and buffers that the folder lacks; they are as they were.

    Raises:
        ModelError: If it has no such files, or weights of another shape.
    """
    own = {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if _ADAPTER not in name
    }
    filled: dict[int, str] = {}
    with ExitStack() as files:
        stored = _stored(folder, files)
        sources, converters = _plan(model, own, stored)
        for name, source in sources.items():
            if id(own[name]) in filled:
                _refuse_untied(own[name], stored[source], (filled[id(own[name])], name), folder)
            _fill(own[name], stored[source], name, folder)
            filled[id(own[name])] = name
        for first, converter in converters.items():
            whole = converter.convert(first, model=model, config=model.config)
            for name, values in whole.items():
                tensor = values[0] if isinstance(values, list) else values
                _fill(own[name], tensor, name, folder)
                filled[id(own[name])] = name
    return {name for name, tensor in own.items() if id(tensor) not in filled}


def fill_parameter(parameter: torch.Tensor, values: Any) -> None:
    """Copies this rank's part of whole values into a parameter, sharded or not.

    Args:
        parameter: `[...]`, a DTensor or not.
        values: Of the same shape; a tensor, or a slice of a safetensors file, of which only this
            part is read.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel():
        local.copy_(values[_own_part(parameter)])


def _own_part(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Where this rank's part lies in the whole tensor; it is not empty."""
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # `distribute_tensor` cannot split what tensor parallelism has split along the same
        # dimension. The last axis of the mesh, tensor, comes first: FSDP2 shards what it leaves.
        for axis in reversed(range(mesh.ndim)):
            placement = parameter.placements[axis]
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim  # type: ignore[attr-defined]
            start, stop = bounds[dim]
            size = -(-(stop - start) // mesh.size(axis))  # as `torch.chunk` deals
            start = min(start + mesh.get_local_rank(axis) * size, stop)
            bounds[dim] = start, min(start + size, stop)
    return tuple(slice(*bound) for bound in bounds) or (...,)


def _stored(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Slices of the tensors in a folder by name; nothing is read yet."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"the model folder {folder.name!r} has no {missing[0]}",
            expected="safetensors files, whose slices several ranks can read",
            got=", ".join(sorted(path.name for path in folder.glob("*"))[:6]) or "nothing",
            fix="save the model with save_pretrained, or name a complete checkpoint",
        )
    opened = [files.enter_context(safe_open(folder / name, framework="pt")) for name in names]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def _plan(
    model: Any, own: Mapping[str, torch.Tensor], stored: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Which stored tensor each of a model's own is, and what makes the others of several.

    By the rules of transformers' `from_pretrained`; those that held are left with the model, which
    is saved under the same names then.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = model._weight_conversions or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, str] = {}
    merged: dict[str, Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            continue
        if pattern is None:
            sources[name] = key
        else:
            rule = merged.setdefault(name, deepcopy(by_pattern[pattern]))
            rule.add_tensor(name, key, pattern, partial(stored[key].__getitem__, ...))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return sources, merged


def _fill(parameter: torch.Tensor, values: Any, name: str, folder: Path) -> None:
    shape = values.shape if isinstance(values, torch.Tensor) else values.get_shape()
    if tuple(shape) != tuple(parameter.shape):
        raise ModelError(
            f"the weights in {folder.name!r} do not fit its config",
            expected=f"{name} of shape {tuple(parameter.shape)}",
            got=f"shape {tuple(shape)}",
            fix="name a complete checkpoint of one model",
        )
    fill_parameter(parameter, values)


def _refuse_untied(
    parameter: torch.Tensor, values: Any, names: tuple[str, str], folder: Path
) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() and not torch.equal(local, values[_own_part(parameter)].to(local)):
        raise ModelError(
            f"the config in {folder.name!r} ties weights that differ",
            expected=f"{names[0]} equal to {names[1]}",
            got="two different tensors",
            fix="set tie_word_embeddings to false in the config.json",
        )
