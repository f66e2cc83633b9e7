"""What every conversion begins and ends with: a source that is there, a target that is not."""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError, StoreError
from nemo_rl_core.infra import files


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the name `target` on a clean exit, and else is removed.

    Raises:
        StoreError: If the target exists, or the disk refuses.
    """
    if target.exists():
        raise StoreError(
            f"the target {target} exists",
            expected="a folder that does not exist yet",
            fix="remove it, or name another",
        )
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{files.ASIDE}")
    try:
        with files.storage_errors(target):
            aside.mkdir(parents=True)
            yield aside
            files.fsync_tree(aside)
            aside.rename(target)
            files.fsync(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_folder(folder: Path, *names: str) -> None:
    """Refuses a folder that lacks one of the files.

    Raises:
        ModelError: Naming the first that is missing.
    """
    for name in names:
        if not (folder / name).is_file():
            there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
            raise ModelError(
                f"the folder {folder} has no {name}",
                expected=f"a folder with {', '.join(names)}",
                got="no such folder" if there is None else ", ".join(there[:6]) or "nothing",
                fix="correct the path of the source",
            )


class StoredWeights:
    """The tensors of a transformers folder's safetensors files, read one at a time.

    Args:
        folder: With `model.safetensors`, or several files and their index.

    Raises:
        ModelError: If there are none.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            require_folder(folder, "model.safetensors")
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        require_folder(folder, *sorted(set(self._file_of.values())))
        self._folder = folder

    @property
    def names(self) -> list[str]:
        """In the order of the files."""
        return list(self._file_of)

    def read(self, name: str) -> Any:
        """One tensor, on the CPU."""
        from safetensors import safe_open

        with safe_open(self._folder / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without its values."""
        from safetensors import safe_open

        with safe_open(self._folder / self._file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> Any:
        """A tensor's `torch.dtype`."""
        return self.read(name).dtype
