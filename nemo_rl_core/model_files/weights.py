"""Matching of stored tensors to a model's weights, and reading of each rank's part.

A model for several ranks is created without weights (on torch's meta device), sharded, allocated
for each rank's shards only, and filled from the files. A rank only needs memory for its shards and
the tensor being read: a slice, or a full tensor if transformers merges several published tensors
(the experts of a layer).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.checkpoints.weights import (
    Shape,
    as_published,
    refuse_wrong_weights,
    require_finite,
)
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import is_spare_head, name_in_errors
from nemo_rl_core.model_files.quantized import (
    dequantized_slices,
    quantized_layers,
    refuse_quantized,
)

_ADAPTER = ".lora_"


def plain_name(name: str) -> str:
    """Returns the name of a weight in the model without adapters."""
    return name.replace(".base_layer", "")


def check_weights(model: Any, shapes: Mapping[str, Shape], source: str) -> None:
    """Checks the names and shapes of full tensors against a model.

    The rules are those of transformers' `from_pretrained`: tied weights may occur once or twice,
    and weights that the architecture ignores are allowed. No value is read.
    """
    rules = model._weight_conversions  # `missing_weights` keeps only those that apply
    refuse_wrong_weights(source, missing=missing_weights(model, shapes, source))
    model._weight_conversions = rules


def check_folder(model: Any, folder: Path) -> None:
    """Checks the tensors in a folder with `check_weights`; only reads the headers of files."""
    refuse_quantized(folder)
    with ExitStack() as files:
        shapes = {name: tuple(s.get_shape()) for name, s in stored_slices(folder, files).items()}
    check_weights(model, shapes, name_in_errors(folder))


def missing_weights(
    model: Any,
    shapes: Mapping[str, Shape],
    source: str,
    *,
    may_have: Callable[[str], bool] = lambda _: False,
) -> set[str]:
    """Returns the missing weights of a model after checking all others.

    Args:
        model: A model with its loading conversions; applicable ones stay attached.
        shapes: Shapes by the names in the architecture's checkpoints.
    """
    weights = plain_weights(model)
    no_values = {name: torch.empty(0, device="meta") for name in shapes}
    named, merged, surplus = match_stored(model, weights, no_values)
    filled = {id(weights[name]) for name in (*named, *merged)}
    expected = {key: tuple(weights[name].shape) for name, key in named.items()}
    # The experts of a layer are one weight in the model and many tensors in the checkpoint, some of
    # which may be missing.
    fused = ((name, torch.empty(weights[name].shape, device="meta")) for name in merged)
    expected |= {name: tuple(piece.shape) for name, piece in as_published(model, fused)}
    missing = {name for name, tensor in weights.items() if id(tensor) not in filled}
    missing_pieces = expected.keys() - shapes.keys()
    report = SimpleNamespace(missing_keys=set(), unexpected_keys=surplus)
    model._adjust_missing_and_unexpected_keys(report)
    misshapen = {
        name: (shapes[name], shape)
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    }
    unknown = [name for name in report.unexpected_keys if not may_have(name)]
    if missing_pieces or misshapen or unknown:
        refuse_wrong_weights(
            source, missing=missing | missing_pieces, misshapen=misshapen, surplus=unknown
        )
    return missing


def plain_weights(model: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and saved buffers by plain name, without adapters."""
    return {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if _ADAPTER not in name
    }


def stored_slices(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Returns slices of the tensors in a folder by name; nothing is read yet."""
    opened = [files.enter_context(open_weights(path)) for path in weight_files(folder)]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def match_stored(
    model: Any, weights: Mapping[str, torch.Tensor], stored: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Returns stored tensors by model weight, converters of other weights, and surplus tensors.

    The rules are those of transformers' `from_pretrained`. Applied rules stay attached to the
    model, which is then saved under the same names.
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
    surplus: set[str] = set()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, weights)
        if name not in weights and key in weights:
            name, pattern = rename_source_key(key, [], [], prefix, weights)
        if name not in weights:
            surplus.add(key)
        elif pattern is None:
            sources[name] = key
        else:
            rule = merged.setdefault(name, deepcopy(by_pattern[pattern]))
            rule.add_tensor(name, key, pattern, partial(stored[key].__getitem__, ...))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return sources, merged, surplus


def allocate(model: Any, device: torch.device) -> None:
    """Allocates parameters without memory on a device; shared ones stay shared.

    Their values are undefined until they are filled.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # FSDP2 only accepts replaced parameters in this method.
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


@contextmanager
def placeholder_weights(model: Any) -> Iterator[None]:
    """Context in which parameters without memory are replaced with expanded zeros on the CPU.

    Used for code that creates new parameters on the device of existing ones. `requires_grad` may be
    changed within.
    """
    empty: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    zeros: dict[int, torch.nn.Parameter] = {
        id(parameter): torch.nn.Parameter(torch.zeros(()).expand(parameter.shape))
        for _, _, parameter in empty
    }
    for parameters, name, parameter in empty:
        parameters[name] = zeros[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in empty:
            parameters[name] = parameter.requires_grad_(parameters[name].requires_grad)


@torch.no_grad()
def fill_from_folder(model: Any, folder: Path) -> set[str]:
    """Fills a model, sharded or not, from a transformers folder; returns the missing weights.

    Missing weights and adapters are unchanged.
    """
    weights = plain_weights(model)
    filled: dict[int, str] = {}
    with ExitStack() as files:
        stored = dequantized_slices(folder, stored_slices(folder, files))
        shapes = {name: tuple(each.get_shape()) for name, each in stored.items()}
        may_have = partial(is_spare_head, folder)
        missing = missing_weights(model, shapes, name_in_errors(folder), may_have=may_have)
        sources, converters, _ = match_stored(model, weights, stored)
        for name, source in sources.items():
            weight = weights[name]
            if id(weight) in filled:
                _refuse_untied(weight, stored[source], (filled[id(weight)], name), folder)
            fill_parameter(weight, stored[source])
            filled[id(weight)] = name
        for first, converter in converters.items():
            converted = converter.convert(first, model=model, config=model.config)
            for name, values in converted.items():
                fill_parameter(weights[name], values[0] if isinstance(values, list) else values)
                filled[id(weights[name])] = name
    require_finite(
        name_in_errors(folder), ((name, local(weights[name])) for name in filled.values())
    )
    return missing


@torch.no_grad()
def replace_quantized(model: Any, other: Any) -> None:
    """Replaces the base weights of a quantized model with those of another one of its class."""
    layers = quantized_layers(model).values(), quantized_layers(other).values()
    for layer, replacement in zip(*layers, strict=True):
        layer.weight = replacement.weight
    theirs = plain_weights(other)
    for name, weight in plain_weights(model).items():
        weight.copy_(theirs[name])


def fill_parameter(parameter: torch.Tensor, values: Any) -> None:
    """Copies this rank's part of full values, or of a safetensors slice, into a parameter."""
    shard = local(parameter)
    if shard.numel():
        shard.copy_(values[_local_slices(parameter)])


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter, sharded or not."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_slices(parameter: torch.Tensor) -> tuple[Any, ...]:
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # `distribute_tensor` cannot split a dimension that tensor parallelism has split. The tensor
        # axis, which is last in the mesh, is applied first, since FSDP2 shards its result.
        for axis in reversed(range(mesh.ndim)):
            placement = parameter.placements[axis]
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim  # type: ignore[attr-defined]
            start, stop = bounds[dim]
            size = -(-(stop - start) // mesh.size(axis))  # as in `torch.chunk`
            start = min(start + mesh.get_local_rank(axis) * size, stop)
            bounds[dim] = start, min(start + size, stop)
    return tuple(slice(*bound) for bound in bounds) or (...,)


def _refuse_untied(
    parameter: torch.Tensor, values: Any, names: tuple[str, str], folder: Path
) -> None:
    shard = local(parameter)
    if shard.numel() and not torch.equal(shard, values[_local_slices(parameter)].to(shard)):
        raise ModelError(
            f"the config in {folder.name!r} ties weights that differ",
            expected=f"{names[0]} equal to {names[1]}",
            got="two different tensors",
            fix="set tie_word_embeddings to false in the config.json",
        )
