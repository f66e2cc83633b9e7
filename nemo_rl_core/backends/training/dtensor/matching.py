"""Matching of checkpoint tensors to model weights, by the rules of transformers.

Names and shapes are checked against a model before values are read; a model without memory
suffices.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.loading import as_published, called
from nemo_rl_core.backends.training.dtensor.quantized import refuse_quantized
from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.checkpoints.weights import Shape, refuse_wrong_weights

_ADAPTER = ".lora_"


def plain_name(name: str) -> str:
    """Name of a weight in the model without adapters."""
    return name.replace(".base_layer", "")


def check_weights(model: Any, shapes: Mapping[str, Shape], source: str) -> None:
    """Checks the names and shapes of whole tensors against a model.

    By the rules of transformers' `from_pretrained`: tied weights may come once or twice, and
    weights that the architecture ignores are allowed. No value is read.

    Args:
        model: As `empty_model` returns it; unchanged.
        shapes: Shapes by the names in the architecture's checkpoints.
        source: Name of the tensors' source in error messages.

    Raises:
        ModelError: Names weights that are missing, surplus or of another shape.
    """
    rules = model._weight_conversions
    refuse_wrong_weights(source, missing=missing_weights(model, shapes, source))
    model._weight_conversions = rules


def check_folder(model: Any, folder: Path) -> None:
    """Checks the tensors in a folder by `check_weights`; only their files' headers are read.

    Raises:
        ModelError: If the folder's weights are quantized, too.
    """
    refuse_quantized(folder)
    with ExitStack() as files:
        shapes = {name: tuple(s.get_shape()) for name, s in stored_slices(folder, files).items()}
    check_weights(model, shapes, called(folder))


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
        source: Name of the tensors' source in error messages.
        may_have: Returns whether a surplus weight is expected.

    Raises:
        ModelError: Names weights that are surplus, of another shape, or incomplete; then also
            missing ones.
    """
    own = own_weights(model)
    named, merged, surplus = plan(model, own, {n: torch.empty(0, device="meta") for n in shapes})
    found = {id(own[name]) for name in (*named, *merged)}
    expected = {key: tuple(own[name].shape) for name, key in named.items()}
    # The experts of a layer are one weight in the model and many tensors in the checkpoint, of
    # which one may be missing.
    whole = ((name, torch.empty(own[name].shape, device="meta")) for name in merged)
    expected |= {name: tuple(piece.shape) for name, piece in as_published(model, whole)}
    missing = {name for name, tensor in own.items() if id(tensor) not in found}
    pieces = expected.keys() - shapes.keys()
    report = SimpleNamespace(missing_keys=set(), unexpected_keys=surplus)
    model._adjust_missing_and_unexpected_keys(report)
    misshapen = {
        name: (shapes[name], shape)
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    }
    unknown = [name for name in report.unexpected_keys if not may_have(name)]
    if pieces or misshapen or unknown:
        refuse_wrong_weights(source, missing=missing | pieces, misshapen=misshapen, surplus=unknown)
    return missing


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by plain name; adapters are not among them."""
    return {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if _ADAPTER not in name
    }


def stored_slices(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Slices of the tensors in a folder by name; nothing is read yet."""
    opened = [files.enter_context(open_weights(path)) for path in weight_files(folder)]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def plan(
    model: Any, own: Mapping[str, torch.Tensor], stored: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Returns stored tensors by model weight, converters of other weights, and unused tensors.

    By the rules of transformers' `from_pretrained`; applied rules stay attached to the model, which
    is then saved under the same names.
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
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            surplus.add(key)
        elif pattern is None:
            sources[name] = key
        else:
            rule = merged.setdefault(name, deepcopy(by_pattern[pattern]))
            rule.add_tensor(name, key, pattern, partial(stored[key].__getitem__, ...))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return sources, merged, surplus
