"""Conversion of a `torch.distributed.checkpoint` folder of another trainer to transformers.

The default format, with `.metadata` and `*.distcp`. The dtensor backend's own checkpoints need no
conversion: their `model/` is a transformers folder.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from nemo_rl_core.backends.training.dtensor.loading import as_published
from nemo_rl_core.checkpoints.dcp_metadata import read_metadata
from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.converters.folders import new_folder, require_folder
from nemo_rl_core.data.pretrained import copy_description
from nemo_rl_core.errors import ModelError, StoreError


def dcp_to_hf(
    checkpoint: Path,
    model_folder: Path,
    target: Path,
    *,
    prefix: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """Reads the model's tensors one at a time and writes a transformers folder.

    Args:
        checkpoint: A folder with `.metadata`. Only tensors are read, and unpickling is restricted
            to the types that describe tensors.
        model_folder: Config and tokenizer of the model; its weights, if any, are ignored.
        target: A folder that does not exist yet.
        prefix: Prefix of transformers' names, such as `model.`; None detects it.
        max_shard_bytes: Bound on the size of one safetensors file.

    Returns:
        The number of tensors.

    Raises:
        StoreError: If the target exists, or the checkpoint is damaged.
        ModelError: If the checkpoint lacks weights of the model, or has some of another shape or
            with non-finite values.
    """
    require_folder(model_folder, "config.json")
    model = _without_weights(model_folder)
    reader = _CheckedReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    shapes = _expected(model)
    before = prefix if prefix is not None else _prefix(saved, shapes, checkpoint)
    wanted = {name: saved.get(before + name) for name in shapes}
    wrong = [name for name, entry in wanted.items() if getattr(entry, "size", None) != shapes[name]]
    if wrong:
        entry = wanted[wrong[0]]
        raise ModelError(
            f"the checkpoint {checkpoint} does not hold this model",
            expected=f"{before}{wrong[0]} of shape {tuple(shapes[wrong[0]])}",
            got="no such tensor" if entry is None else str(tuple(getattr(entry, "size", ()))),
            fix="name the config that the checkpoint was trained with",
        )
    dtypes = {entry.properties.dtype for entry in wanted.values()}
    weights = ((name, _read(reader, before + name, entry)) for name, entry in wanted.items())
    with new_folder(target) as folder:
        only = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
        copy_description(model_folder, folder, dtype=only)
        save_weights(folder, as_published(model, weights), max_shard_bytes=max_shard_bytes)
    return len(wanted)


class _CheckedReader(FileSystemReader):
    """Torch's reader with restricted unpickling of the metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        try:
            self._metadata = read_metadata(folder)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise StoreError(
                f"{folder} is not a readable torch.distributed.checkpoint folder",
                expected=".metadata and *.distcp of torch's default format",
                got=f"{type(error).__name__}: {error}"[:300],
                fix="name the folder that holds .metadata; one with safetensors needs no "
                "conversion",
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


def _read(reader: FileSystemReader, name: str, entry: Any) -> torch.Tensor:
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    load({name: tensor}, storage_reader=reader, no_dist=True)
    require_finite("the checkpoint", [(name, tensor)])
    return tensor


def _without_weights(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _expected(model: Any) -> dict[str, torch.Size]:
    """Shapes by name; tied weights once, under the first of their names."""
    return dict(_distinct(model))


def _distinct(model: Any) -> Iterator[tuple[str, torch.Size]]:
    yield from ((name, parameter.shape) for name, parameter in model.named_parameters())
    persistent = model.state_dict().keys()
    yield from (
        (name, buffer.shape) for name, buffer in model.named_buffers() if name in persistent
    )


def _prefix(saved: Any, shapes: dict[str, torch.Size], checkpoint: Path) -> str:
    first = next(iter(shapes))
    found = [
        before
        for before in (key.removesuffix(first) for key in saved if key.endswith(first))
        if all(before + name in saved for name in shapes)
    ]
    if len(found) != 1:
        raise ModelError(
            f"the model was not found in {checkpoint}",
            expected=f"one prefix before transformers' names, such as {first}",
            got=f"prefixes {sorted(found)}" if found else f"names such as {sorted(saved)[:3]}",
            fix="name the prefix, and the config that the checkpoint was trained with",
        )
    return str(found[0])
