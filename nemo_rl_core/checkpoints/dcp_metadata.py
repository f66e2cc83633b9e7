"""The description of a `torch.distributed.checkpoint` folder, read as what it is: a pickle.

Torch reads `.metadata` without restriction. It is read here first, with a list of the only things
that it may name.
"""

import pickle
from pathlib import Path
from typing import Any

import torch


def read_metadata(folder: Path) -> Any:
    """The `Metadata` of a checkpoint folder.

    Raises:
        UnpicklingError: If the file is no pickle, or names something that no checkpoint needs.
        OSError: If there is no such file.
    """
    with (folder / ".metadata").open("rb") as file:
        return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's description of shards, and nothing that names other things."""

    _ALLOWED = frozenset(
        {
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("torch", "Size"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            # Says that there is an object, which is read only by who asks for it by name.
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
        is_type_of_tensor = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if not is_type_of_tensor and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
