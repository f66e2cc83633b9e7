"""Conversion of a `torch.distributed.checkpoint` folder of another trainer to transformers.

Reads the default format, with `.metadata` and `*.distcp`. Checkpoints of the dtensor backend need
no conversion: their `model/` is a transformers folder.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from nemo_rl_core.checkpoints.dcp_metadata import read_metadata
from nemo_rl_core.checkpoints.model_code import code_options
from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.checkpoints.weights import as_published, require_finite
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
    """Writes a transformers folder, one tensor in memory at a time; returns the number of tensors.

    Unpickling is restricted to types that describe tensors.

    Args:
        checkpoint: A folder with `.metadata`.
        model_folder: Folder with config and tokenizer of the model; its weights are ignored.
        target: A folder that does not exist yet.
        prefix: Prefix that the checkpoint puts before transformers' names, such as `model.`; None
            detects it.
        max_shard_bytes: Bound on the size of one safetensors file.
    """
    require_folder(model_folder, "config.json")
    model = _without_weights(model_folder)
    reader = _CheckedReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    shapes = _expected(model)
    if prefix is None:
        prefix = _detect_prefix(saved, shapes, checkpoint)
    entries = {name: saved.get(prefix + name) for name in shapes}
    wrong = [n for n, entry in entries.items() if getattr(entry, "size", None) != shapes[n]]
    if wrong:
        entry = entries[wrong[0]]
        raise ModelError(
            f"the checkpoint {checkpoint} does not contain this model",
            expected=f"{prefix}{wrong[0]} of shape {tuple(shapes[wrong[0]])}",
            got="no such tensor" if entry is None else str(tuple(getattr(entry, "size", ()))),
            fix="name the config that the checkpoint was trained with",
        )
    dtypes = {entry.properties.dtype for entry in entries.values()}
    weights = ((name, _read(reader, prefix + name, entry)) for name, entry in entries.items())
    with new_folder(target) as folder:
        dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
        copy_description(model_folder, folder, dtype=dtype)
        save_weights(folder, as_published(model, weights), max_shard_bytes=max_shard_bytes)
    return len(entries)


class _CheckedReader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        try:
            self._metadata = read_metadata(folder)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise StoreError(
                f"{folder} is not a readable torch.distributed.checkpoint folder",
                expected=".metadata and *.distcp of torch's default format",
                got=f"{type(error).__name__}: {error}"[:300],
                fix="name the folder that contains .metadata; a folder with safetensors needs "
                "no conversion",
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

    options = code_options(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, **options), **options
        )


def _expected(model: Any) -> dict[str, torch.Size]:
    """Returns shapes by name; tied weights appear once, under the first of their names."""
    persistent = model.state_dict().keys()
    buffers = {name: each.shape for name, each in model.named_buffers() if name in persistent}
    return {name: each.shape for name, each in model.named_parameters()} | buffers


def _detect_prefix(saved: Any, shapes: dict[str, torch.Size], checkpoint: Path) -> str:
    first = next(iter(shapes))
    prefixes = [
        prefix
        for prefix in (key.removesuffix(first) for key in saved if key.endswith(first))
        if all(prefix + name in saved for name in shapes)
    ]
    if len(prefixes) != 1:
        raise ModelError(
            f"the model was not found in {checkpoint}",
            expected=f"one prefix before transformers' names, such as {first}",
            got=f"prefixes {sorted(prefixes)}" if prefixes else f"names like {sorted(saved)[:3]}",
            fix="name the prefix, and the config that the checkpoint was trained with",
        )
    return str(prefixes[0])
