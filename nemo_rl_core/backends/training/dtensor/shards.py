"""Reading of weights from safetensors files, each rank its own slices.

A model for several ranks is created without weights (on torch's meta device), sharded, allocated
for each rank's shards only, and filled from the files. No rank holds more than its shards and the
tensor being read: a slice, or a whole tensor if transformers merges several published tensors (the
experts of a layer). Random weights need no special case: the stage that samples them writes a
folder.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from nemo_rl_core.backends.training.dtensor.loading import called, is_spare_head
from nemo_rl_core.backends.training.dtensor.matching import (
    missing_weights,
    own_weights,
    plan,
    stored_slices,
)
from nemo_rl_core.backends.training.dtensor.quantized import dequantized_slices
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.errors import ModelError


def allocate(model: Any, device: torch.device) -> None:
    """Allocates parameters without memory on a device; shared ones stay shared.

    Their values are undefined until they are filled.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    # Only in this method does FSDP2 accept replaced parameters.
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


@contextmanager
def standing_in(model: Any) -> Iterator[None]:
    """Context in which parameters without memory are expanded zeros on the CPU.

    For code that creates new parameters on the device of existing ones. `requires_grad` may be
    changed within.
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
        model: Loaded by transformers, or with its loading conversions.
        folder: A folder with `model.safetensors`, or several files and their index.

    Returns:
        Names of parameters and buffers that the folder lacks; they are unchanged.

    Raises:
        ModelError: If it has no such files, quantized weights other than FP8, or weights that are
            surplus, of another shape or, in this rank's shards, not finite.
    """
    own = own_weights(model)
    filled: dict[int, str] = {}
    with ExitStack() as files:
        stored = dequantized_slices(folder, stored_slices(folder, files))
        shapes = {name: tuple(each.get_shape()) for name, each in stored.items()}
        may_have = partial(is_spare_head, folder)
        missing = missing_weights(model, shapes, called(folder), may_have=may_have)
        sources, converters, _ = plan(model, own, stored)
        for name, source in sources.items():
            if id(own[name]) in filled:
                _refuse_untied(own[name], stored[source], (filled[id(own[name])], name), folder)
            fill_parameter(own[name], stored[source])
            filled[id(own[name])] = name
        for first, converter in converters.items():
            for name, values in _converted(model, first, converter).items():
                fill_parameter(own[name], values)
                filled[id(own[name])] = name
    require_finite(called(folder), ((name, local(own[name])) for name in filled.values()))
    return missing


def fill_parameter(parameter: torch.Tensor, values: Any) -> None:
    """Copies this rank's part of whole values into a parameter, sharded or not.

    Args:
        parameter: `[...]`, a DTensor or not.
        values: Values of the same shape; a tensor, or a safetensors slice, of which only this part
            is read.
    """
    own = local(parameter)
    if own.numel():
        own.copy_(values[_own_part(parameter)])


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharded or not."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _own_part(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Slices of this rank's part in the whole tensor; not empty."""
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        # `distribute_tensor` cannot split a dimension that tensor parallelism has split. The tensor
        # axis, last in the mesh, comes first: FSDP2 shards the result.
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


def _converted(model: Any, first: str, converter: Any) -> dict[str, torch.Tensor]:
    whole = converter.convert(first, model=model, config=model.config)
    return {name: v[0] if isinstance(v, list) else v for name, v in whole.items()}


def _refuse_untied(
    parameter: torch.Tensor, values: Any, names: tuple[str, str], folder: Path
) -> None:
    own = local(parameter)
    if own.numel() and not torch.equal(own, values[_own_part(parameter)].to(own)):
        raise ModelError(
            f"the config in {folder.name!r} ties weights that differ",
            expected=f"{names[0]} equal to {names[1]}",
            got="two different tensors",
            fix="set tie_word_embeddings to false in the config.json",
        )
