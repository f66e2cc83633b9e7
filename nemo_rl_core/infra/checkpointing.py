"""Checkpoints that survive a kill at any moment, and tensors on disk without pickle.

One process at a time saves to, or recovers from, a checkpoint folder: the store's lock on the
stage's work folder sees to that.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import StoreError
from nemo_rl_core.infra import files

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

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


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """Writes tensors of any shape and device to a safetensors file, atomically.

    Tensors that share memory (tied embeddings) are written, and come back, as separate ones.

    Raises:
        StoreError: If the disk refuses; an older file then stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        address = copy.untyped_storage().data_ptr()
        plain[name] = copy.clone() if address in seen else copy
        seen.add(address)
    with files.written_aside(path) as aside:
        try:
            save_file(plain, aside)
        except SafetensorError as error:
            raise StoreError(
                f"cannot write the tensors of {path}",
                got=str(error),
                fix="free some space, or point NEMO_RL_HOME at another disk",
            ) from error


def load_tensors(path: Path) -> dict[str, "Tensor"]:
    """Reads a safetensors file to the CPU.

    Raises:
        StoreError: If the file is missing, or is no whole safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(
            f"cannot read tensors from {path}",
            expected="a whole safetensors file",
            got=f"{type(error).__name__}: {error}",
            fix="remove the folder it lies in, and run the stage again",
        ) from error


def optimizer_tensors(optimizer: "Optimizer", names: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """An AdamW's state as flat tensors named `<parameter>.<state>`, such as `lm_head.weight.step`.

    The groups' settings (learning rate, betas) are left out: they come from the config and the
    schedule, which know them from the step.

    Args:
        optimizer: One whose state holds tensors only, as AdamW's does.
        names: The trained parameters by name: `dict(model.named_parameters())`.

    Raises:
        ValueError: If the optimizer trains a parameter that `names` lacks.
    """
    name_of = {parameter: name for name, parameter in names.items()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        if parameter not in name_of:
            raise ValueError(f"no name for a trained parameter of shape {tuple(parameter.shape)}")
        for key, value in state.items():
            tensors[f"{name_of[parameter]}.{key}"] = value
    return tensors


def restore_optimizer(
    optimizer: "Optimizer", names: Mapping[str, "Tensor"], tensors: Mapping[str, "Tensor"]
) -> None:
    """Gives an optimizer the state that `optimizer_tensors` took, equal to the bit.

    Set directly and not through `load_state_dict`, which knows parameters by index and casts.

    Raises:
        StoreError: If the tensors are those of other parameters; the optimizer is then unchanged.
    """
    settings = {
        parameter: group for group in optimizer.param_groups for parameter in group["params"]
    }
    restored: dict[Tensor, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = names.get(name)
        if parameter is None or parameter not in settings:
            raise _foreign_state(f"{full_name}, and no such parameter is trained")
        if key != "step" and tensor.shape != parameter.shape:
            shapes = f"{tuple(tensor.shape)}, and the parameter {tuple(parameter.shape)}"
            raise _foreign_state(f"{full_name} has shape {shapes}")
        group = settings[parameter]
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else "cpu"
        restored.setdefault(parameter, {})[key] = tensor.detach().to(device, copy=True)
    optimizer.state.clear()
    optimizer.state.update(restored)


def _foreign_state(got: str) -> StoreError:
    return StoreError(
        "the saved optimizer state does not fit this model",
        expected="the state of the same parameters",
        got=got,
        fix="resume with the model config that the checkpoint was made with",
    )
