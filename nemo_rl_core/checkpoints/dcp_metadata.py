"""Reads a `torch.distributed.checkpoint` folder's metadata; unpickles only allowed classes."""

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.store.paths import resolve_below


def read_metadata(folder: Path) -> Any:
    """Reads the `Metadata` of a checkpoint folder.

    Raises:
        UnpicklingError: If the file is not a pickle, or names a class that no checkpoint needs.
        UnsafePathError: If it names a file outside of the folder.
        OSError: If the file is missing.
    """
    with (folder / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    stored = getattr(metadata, "storage_data", None)
    for each in stored.values() if isinstance(stored, dict) else ():
        resolve_below(folder, str(getattr(each, "relative_path", "")), source=".metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch's description of shards; refuses all other classes."""

    _ALLOWED = frozenset(
        {
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("torch", "Size"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            # Describes an object, which is only read on request by name.
            ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.planner", "SavePlan"),
            ("torch.distributed.checkpoint.planner", "TensorWriteData"),
            ("torch.distributed.checkpoint.planner", "WriteItem"),
            ("torch.distributed.checkpoint.planner", "WriteItemType"),
            ("torch.serialization", "_get_layout"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _member(owner: Any, name: str) -> Enum:
    """Returns an enum member by name, which Python before 3.11.4 pickles as a `getattr` call."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it reads an attribute {name!r} that is not a member of an enum")
