"""Source and target folders of conversions."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.errors import ModelError, StoreError
from nemo_rl_core.store import files


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `target` on success and removed on an error."""
    if target.exists():
        raise StoreError(
            f"the target {target} exists",
            expected="a folder that does not exist yet",
            fix="remove it, or name another folder",
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
    """Refuses a folder without one of the files."""
    for name in names:
        if not (folder / name).is_file():
            entries = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
            raise ModelError(
                f"the folder {folder} has no {name}",
                expected=f"a folder with {', '.join(names)}",
                got="no such folder" if entries is None else ", ".join(entries[:6]) or "nothing",
                fix="correct the path of the source",
            )


class StoredWeights:
    """The tensors of a transformers folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path_of: dict[str, Path] = {}
        for path in weight_files(folder):
            with open_weights(path) as file:
                self._path_of |= dict.fromkeys(file.keys(), path)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the files."""
        return list(self._path_of)

    def read(self, name: str) -> Any:
        """Reads one tensor to the CPU; refuses NaN and infinity."""
        with open_weights(self._path_of[name]) as file:
            tensor = file.get_tensor(name)
        require_finite(f"the folder {self._folder}", [(name, tensor)])
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading its values."""
        with open_weights(self._path_of[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> Any:
        """Returns a tensor's `torch.dtype`."""
        return self.read(name).dtype
