"""Checkpoints that survive a kill at any moment.

One process at a time saves to, or recovers from, a checkpoint folder: the store's lock on the
stage's work folder sees to that.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl_core.infra import files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# Not one of the leftovers that `files` may sweep: until recovered it can be the only whole copy.
_OLD = ".old~"


def save_atomic(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes `folder` hold what `write` writes; killed at any moment, it holds old or new in whole.

    Replacing takes two renames, old out of the way and new in its place. After a kill between the
    two the old one lies beside; `recover` (which every save calls first) puts it back.

    Args:
        folder: The folder to make or to replace.
        write: Gets an empty folder to fill.

    Raises:
        StoreError: If the disk refuses. Whatever `write` raises passes. The old folder then stays.
    """
    aside, old = _aside(folder), _old(folder)
    with files.storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover(folder)
        aside.mkdir()
        try:
            write(aside)
            files.fsync_tree(aside)
            if folder.exists():
                folder.rename(old)
            aside.rename(folder)
            files.fsync(folder.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            recover(folder)
            raise
        if old.exists():
            files.discard(old)


def recover(folder: Path) -> None:
    """Tidies up after a killed `save_atomic`: puts an old folder back unless the new one is there.

    Call it before reading a folder that `save_atomic` wrote. Does nothing after a clean save.
    """
    aside, old = _aside(folder), _old(folder)
    if old.exists():
        if folder.exists():
            files.discard(old)
        else:
            old.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new{files.ASIDE}")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_OLD}")


class CheckpointManager:
    """The numbered checkpoints of one run, each with the sha256 of its files.

    Args:
        root: Holds one folder a checkpoint.
        keep_latest: How many to keep. With one, a disk that damages it leaves no other.

    Example:
        >>> manager = CheckpointManager(folder / "checkpoints")                # doctest: +SKIP
        >>> manager.save(10, lambda path: save_tensors(path / "model.safetensors", tensors))
        >>> manager.latest()
        (10, PosixPath('.../checkpoints/step-00000010'))
    """

    def __init__(self, root: Path, keep_latest: int = 1) -> None:
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be 1 or more, not {keep_latest}")
        self.root, self.keep_latest = root, keep_latest

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Saves a checkpoint, then drops all but the latest up to this step.

        Later steps go too: a run that saves 15 after 20 went back because 20 was refused.

        Args:
            step: Replaces an older checkpoint of the same step.
            write: Gets an empty folder to fill; the name `manifest.json` is taken.

        Returns:
            The checkpoint's folder.

        Raises:
            StoreError: If the disk refuses; older checkpoints then stay.
        """
        path = self._path(step)

        def write_with_manifest(folder: Path) -> None:
            write(folder)
            if (folder / MANIFEST).exists():
                raise ValueError(f"{MANIFEST} is the checkpoint manager's own file")
            files.write_atomic(folder / MANIFEST, _manifest(step, folder))

        save_atomic(path, write_with_manifest)
        kept = [saved for saved in self.steps() if saved <= step][-self.keep_latest :]
        for saved in self.steps():
            if saved not in kept:
                files.discard(self._path(saved))
        files.sweep_discarded(self.root)
        return path

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged or not, in ascending order."""
        names = (path.name.removeprefix("step-") for path in self.root.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self, *, verify: bool = True) -> tuple[int, Path] | None:
        """The newest checkpoint that is whole; refused ones are named in the log.

        Args:
            verify: Compare the content of every file with its sha256, not its size alone.
        """
        self._recover()
        for step in reversed(self.steps()):
            path = self._path(step)
            try:
                _check(step, path, verify=verify)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning(
                    "checkpoint %s is refused: %s: %s", path, type(error).__name__, error
                )
            else:
                return step, path
        return None

    @staticmethod
    def folder_name(step: int) -> str:
        """What the checkpoint of a step is called in `root`."""
        return f"step-{step:08d}"

    def _path(self, step: int) -> Path:
        return self.root / self.folder_name(step)

    def _recover(self) -> None:
        for old in self.root.glob(f".step-*{_OLD}"):
            recover(self.root / old.name.removeprefix(".").removesuffix(_OLD))


def _manifest(step: int, folder: Path) -> str:
    paths = {name: folder / name for name in files.list_files(folder)}
    entries = {
        name: {"sha256": files.hash_file(path), "bytes": path.stat().st_size}
        for name, path in paths.items()
    }
    return json.dumps({"step": step, "files": entries}, indent=1)


def _check(step: int, folder: Path, *, verify: bool) -> None:
    """Raises an OSError, ValueError, KeyError or TypeError unless the checkpoint is whole."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    if manifest["step"] != step:
        raise ValueError(f"its manifest is that of step {manifest['step']}")
    for name, entry in manifest["files"].items():
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}")
        if verify and files.hash_file(folder / name) != entry["sha256"]:
            raise ValueError(f"the content of {name} has changed since it was saved")
