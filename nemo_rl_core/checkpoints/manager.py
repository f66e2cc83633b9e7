"""Checkpoints that survive a kill at any moment; the store's lock admits one process at a time."""

import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.trainer import KeepBest
from nemo_rl_core.store import files
from nemo_rl_core.store.paths import resolve_below

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# `files` must not sweep it as a leftover: until recovered it can be the only complete copy.
_OLD = ".old~"


def save_atomic(folder: Path, write: Callable[[Path], None]) -> None:
    """Creates or replaces a folder; after a kill it has either its old or its new content.

    The new content is written into a staging folder. Replacing takes two renames: the old folder
    gets a different name, then the staging folder takes its name. After a kill in between,
    `recover` (which every save calls first) renames the old one back.
    """
    staging = _begin(folder)
    try:
        with files.storage_errors(folder):
            write(staging)
            _replace(folder)
    except BaseException:
        _abandon(folder)
        raise


def _begin(folder: Path) -> Path:
    staging = _staging(folder)
    with files.storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover(folder)
        staging.mkdir()
    return staging


def _replace(folder: Path, *, synced: Collection[str] = ()) -> None:
    staging, old = _staging(folder), _old(folder)
    files.fsync_tree(staging, synced=synced)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    files.fsync(folder.parent)
    if old.exists():
        files.discard(old)


def _abandon(folder: Path) -> None:
    shutil.rmtree(_staging(folder), ignore_errors=True)
    recover(folder)


def recover(folder: Path) -> None:
    """Cleans up after a killed `save_atomic`; restores the old folder if the new one is missing.

    Call it before reading a folder that `save_atomic` wrote. Does nothing after a complete save.
    """
    staging, old = _staging(folder), _old(folder)
    if old.exists():
        if folder.exists():
            files.discard(old)
        else:
            old.rename(folder)
    shutil.rmtree(staging, ignore_errors=True)


def _staging(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new{files.ASIDE}")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_OLD}")


@dataclass(frozen=True)
class PublishedSave:
    """A published checkpoint, and the digests of files that its writers reported."""

    folder: Path
    written: Mapping[str, WrittenFile]


_callbacks: list[Callable[[PublishedSave], None]] = []
_checked: set[Path] = set()


@contextmanager
def after_each_save(callback: Callable[[PublishedSave], None]) -> Iterator[None]:
    """Calls `callback` after every checkpoint that a manager of this process publishes.

    The callback runs in the publishing thread: the next checkpoint starts when it has returned, and
    its errors are errors of the save.
    """
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def trust(checkpoint: Path) -> None:
    """Skips comparing a checkpoint's digests in this process, because they were just compared."""
    _checked.add(checkpoint.resolve())


class BackgroundWriter(Protocol):
    """Writes a checkpoint while training continues."""

    def start_checkpoint(self, path: Path) -> None:
        """Starts writing a copy of the state into an existing empty folder."""

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        """Waits until the folder is complete; returns the digests that are known."""


@dataclass(frozen=True)
class _SynchronousWriter:
    write: Callable[[Path], None]

    def start_checkpoint(self, path: Path) -> None:
        self.write(path)

    def checkpoint_is_written(self) -> bool:
        return True

    def finish_checkpoint(self) -> None:
        return None


class PendingSave:
    """A checkpoint that is written, then published, both in the background.

    Publishing hashes and syncs the files and gives the checkpoint its name. Until then older
    checkpoints are not touched. If anything fails, the new files are removed.
    """

    def __init__(
        self,
        step: int,
        folder: Path,
        writer: BackgroundWriter,
        publish: Callable[[Mapping[str, WrittenFile]], None],
    ) -> None:
        self.step, self.folder, self.has_ended = step, folder, False
        self._writer, self._publish = writer, publish
        self._published: Future[None] | None = None

    def start(self) -> None:
        """Starts the writer."""
        staging = _begin(self.folder)
        with self._removed_on_failure():
            with files.storage_errors(staging):
                self._writer.start_checkpoint(staging)
            if (staging / MANIFEST).exists():
                raise ValueError(f"{MANIFEST} is reserved for the checkpoint manager")

    def poll(self) -> bool:
        """Whether the checkpoint is published; starts publishing it once written. Never waits."""
        with self._removed_on_failure():
            if self._published is None and self._writer.checkpoint_is_written():
                self._published = self._publishing()
        if self._published is None or not self._published.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Waits until the checkpoint is published."""
        if self.has_ended:
            return
        with self._removed_on_failure():
            self._published = self._published or self._publishing()
            self._published.result()
        self.has_ended = True

    def _publishing(self) -> "Future[None]":
        written = self._writer.finish_checkpoint() or {}
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        future = executor.submit(self._publish, written)
        executor.shutdown(wait=False)
        return future

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_ended = True
            _abandon(self.folder)
            raise


class CheckpointManager:
    """The numbered checkpoints of one run, each with the sha256 of its files.

    Args:
        root: Parent folder of the checkpoint folders.
        keep_latest: Number of newest checkpoints to keep. If it is 1 and the disk damages that
            checkpoint, there is no other.
        keep_best: Additional checkpoints to keep, by one of the metrics they were saved with.

    Example:
        >>> manager = CheckpointManager(folder / "checkpoints")                # doctest: +SKIP
        >>> manager.save(10, lambda path: save_tensors(path / "model.safetensors", tensors))
        >>> manager.latest()
        (10, PosixPath('.../checkpoints/step-00000010'))
    """

    def __init__(
        self, root: str | Path, keep_latest: int = 1, keep_best: KeepBest | None = None
    ) -> None:
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be 1 or more, not {keep_latest}")
        self.root, self.keep_latest, self.keep_best = Path(root), keep_latest, keep_best
        self._pending: PendingSave | None = None

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Saves a checkpoint, then drops those that need not be kept.

        Drops later steps too: a run that saves 15 after 20 resumed from before 20, because
        checkpoint 20 was damaged.

        Args:
            step: Step of the checkpoint; an older checkpoint of the same step is replaced.
            write: Writes into an empty folder; the name `manifest.json` is reserved.
            metrics: Metrics for `keep_best` and `best`.

        Raises:
            StoreError: If writing fails; older checkpoints are then kept.
        """
        self.start(step, _SynchronousWriter(write), metrics=metrics).wait()
        return self.path(step)

    def start(
        self, step: int, writer: BackgroundWriter, *, metrics: Mapping[str, float] | None = None
    ) -> PendingSave:
        """Saves in the background. The checkpoint becomes visible once it is published.

        Waits for an earlier save first.
        """
        if self._pending is not None:
            self._pending.wait()
        publish = partial(self._publish, step, dict(metrics or {}))
        save = PendingSave(step, self.path(step), writer, publish)
        save.start()
        self._pending = save
        return save

    def _publish(
        self, step: int, metrics: Mapping[str, float], written: Mapping[str, WrittenFile]
    ) -> None:
        path = self.path(step)
        staging = _staging(path)
        with files.storage_errors(path):
            files.write_atomic(staging / MANIFEST, _manifest(step, staging, metrics, written))
            _checked.discard(path.resolve())
            _replace(path, synced=written.keys())
        kept = self._kept(step)
        for saved in self.steps():
            if saved not in kept:
                files.discard(self.path(saved))
        files.sweep_discarded(self.root)
        for callback in list(_callbacks):
            callback(PublishedSave(path, written))

    def would_be_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether `keep_best` would keep a checkpoint with these metrics, saved now."""
        new_rank = self._rank(step, metrics) if self.keep_best else None
        if new_rank is None or self.keep_best is None:
            return False
        earlier = (self._rank(each, self._metrics(each)) for each in self.steps() if each < step)
        return sum(rank > new_rank for rank in earlier if rank) < self.keep_best.count

    def _kept(self, step: int) -> set[int]:
        saved = [earlier for earlier in self.steps() if earlier <= step]
        best = self._ranked(saved)[: self.keep_best.count] if self.keep_best else []
        return {*saved[-self.keep_latest :], *best}

    def _ranked(self, steps: Iterable[int]) -> list[int]:
        """Returns the steps that have the metric, best first and newer first among equals."""
        ranks = (self._rank(step, self._metrics(step)) for step in steps)
        return [rank[1] for rank in sorted(filter(None, ranks), reverse=True)]

    def _rank(self, step: int, metrics: Mapping[str, Any]) -> tuple[float, int] | None:
        """Returns a key that is larger for better and newer steps; None without the metric."""
        assert self.keep_best is not None
        try:
            value = float(metrics[self.keep_best.metric])
        except (ValueError, KeyError, TypeError):
            return None  # the step was not validated
        sign = 1.0 if self.keep_best.mode == "max" else -1.0
        return None if math.isnan(value) else (sign * value, step)

    def _metrics(self, step: int) -> Mapping[str, Any]:
        try:
            metrics = json.loads((self.path(step) / MANIFEST).read_text())["metrics"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # a damaged manifest
        return metrics if isinstance(metrics, dict) else {}

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, damaged or not, in ascending order."""
        names = (path.name.removeprefix("step-") for path in self.root.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self, *, verify: bool = True) -> tuple[int, Path] | None:
        """Returns the newest complete checkpoint; `verify` compares digests, not only sizes."""
        self._recover()
        return self._first_complete(reversed(self.steps()), verify=verify)

    def best(self, *, verify: bool = True) -> tuple[int, Path] | None:
        """Returns the complete checkpoint with the best metric of `keep_best`; logs refused ones.

        None if no checkpoint was saved with that metric.
        """
        self._recover()
        return self._first_complete(self._ranked(self.steps()), verify=verify)

    def _first_complete(self, steps: Iterable[int], *, verify: bool) -> tuple[int, Path] | None:
        for step in steps:
            path = self.path(step)
            try:
                _check(step, path, verify=verify and path.resolve() not in _checked)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning(
                    "checkpoint %s is refused: %s: %s", path, type(error).__name__, error
                )
            else:
                return step, path
        return None

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint, whether it exists or not."""
        return self.root / f"step-{step:08d}"

    def _recover(self) -> None:
        for old in self.root.glob(f".step-*{_OLD}"):
            recover(self.root / old.name.removeprefix(".").removesuffix(_OLD))
        if self._pending is None or self._pending.has_ended:
            # A killed process was writing these, and their steps may never be saved again.
            for staging in self.root.glob(f".step-*.new{files.ASIDE}"):
                shutil.rmtree(staging, ignore_errors=True)


def _manifest(
    step: int, folder: Path, metrics: Mapping[str, float], written: Mapping[str, WrittenFile]
) -> str:
    entries = {}
    for name in files.list_files(folder):
        digest = written[name].sha256 if name in written else files.hash_file(folder / name)
        entries[name] = {"sha256": digest, "bytes": (folder / name).stat().st_size}
    return json.dumps({"step": step, "metrics": dict(metrics), "files": entries}, indent=1)


def _check(step: int, folder: Path, *, verify: bool) -> None:
    """Raises an OSError, ValueError, KeyError or TypeError unless the checkpoint is complete."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    if manifest["step"] != step:
        raise ValueError(f"its manifest is for step {manifest['step']}")
    for name, entry in manifest["files"].items():
        path = resolve_below(folder, name, source=MANIFEST)
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}")
        if verify and files.hash_file(path) != entry["sha256"]:
            raise ValueError(f"the content of {name} has changed since it was saved")
