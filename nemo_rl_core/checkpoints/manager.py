"""Checkpoints that survive a kill at any moment.

One process at a time saves to, or recovers from, a checkpoint folder: the store's lock on the
stage's work folder sees to that.
"""

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
    aside = _begin(folder)
    try:
        with files.storage_errors(folder):
            write(aside)
            _replace(folder)
    except BaseException:
        _abandon(folder)
        raise


def _begin(folder: Path) -> Path:
    aside = _aside(folder)
    with files.storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover(folder)
        aside.mkdir()
    return aside


def _replace(folder: Path, *, synced: Collection[str] = ()) -> None:
    aside, old = _aside(folder), _old(folder)
    files.fsync_tree(aside, synced=synced)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    files.fsync(folder.parent)
    if old.exists():
        files.discard(old)


def _abandon(folder: Path) -> None:
    shutil.rmtree(_aside(folder), ignore_errors=True)
    recover(folder)


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


@dataclass(frozen=True)
class PublishedSave:
    """A checkpoint that is one of the run's from now on.

    Attributes:
        folder: Where it lies.
        written: What its writers have said of files that they wrote, by relative path.
    """

    folder: Path
    written: Mapping[str, WrittenFile]


_told: list[Callable[[PublishedSave], None]] = []
_checked: set[Path] = set()


@contextmanager
def after_each_save(tell: Callable[[PublishedSave], None]) -> Iterator[None]:
    """Calls `tell` after every checkpoint that a manager of this process publishes meanwhile.

    In the thread that publishes: the next checkpoint is begun when `tell` has returned, and an
    error of it is one of the save.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def trust(checkpoint: Path) -> None:
    """Spares this process the digests of a checkpoint's files, which were compared just now."""
    _checked.add(checkpoint.resolve())


class BackgroundWriter(Protocol):
    """Writes a checkpoint while training goes on."""

    def start_checkpoint(self, path: Path) -> None:
        """Begins to write a copy of the state into an existing empty folder."""
        ...

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""
        ...

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        """Waits until the folder is whole; raises what writing it has raised.

        Returns:
            Files whose digests are known, by relative path; the manager hashes the others.
        """
        ...


@dataclass(frozen=True)
class _WrittenAtOnce:
    """A writer that is done when it has started."""

    write: Callable[[Path], None]

    def start_checkpoint(self, path: Path) -> None:
        self.write(path)

    def checkpoint_is_written(self) -> bool:
        return True

    def finish_checkpoint(self) -> None:
        return None


class PendingSave:
    """A checkpoint that is being saved: written, then published, both in the background.

    To publish is to hash and sync its files and to give it its name. Before that older checkpoints
    stay as they are; if anything fails they stay, and what was written is removed.

    Args:
        step: The checkpoint's.
        folder: Its name when it is published.
        writer: Writes its files.
        publish: Publishes it, given what the writer has said of its files; called in a thread.

    Attributes:
        step: As given.
        folder: As given.
        has_ended: Whether it was published or has failed.
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
        """Starts the writer.

        Raises:
            StoreError: If the disk refuses. What the writer raises passes.
        """
        aside = _begin(self.folder)
        with self._removed_on_failure():
            with files.storage_errors(aside):
                self._writer.start_checkpoint(aside)
            if (aside / MANIFEST).exists():
                raise ValueError(f"{MANIFEST} is the checkpoint manager's own file")

    def poll(self) -> bool:
        """Whether the checkpoint is published; never waits, and publishes what is written.

        Raises:
            StoreError: If the disk refuses. What the writer raises passes.
        """
        with self._removed_on_failure():
            if self._published is None and self._writer.checkpoint_is_written():
                self._published = self._publishing()
        if self._published is None or not self._published.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Waits until the checkpoint is published.

        Raises:
            StoreError: If the disk refuses. What the writer raises passes.
        """
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
        root: Holds one folder a checkpoint.
        keep_latest: How many to keep. With one, a disk that damages it leaves no other.
        keep_best: Which to keep besides, by one of the metrics they were saved with.

    Example:
        >>> manager = CheckpointManager(folder / "checkpoints")                # doctest: +SKIP
        >>> manager.save(10, lambda path: save_tensors(path / "model.safetensors", tensors))
        >>> manager.latest()
        (10, PosixPath('.../checkpoints/step-00000010'))
    """

    def __init__(self, root: Path, keep_latest: int = 1, keep_best: KeepBest | None = None) -> None:
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be 1 or more, not {keep_latest}")
        self.root, self.keep_latest, self.keep_best = root, keep_latest, keep_best
        self._pending: PendingSave | None = None

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Saves a checkpoint, then drops those that need not be kept.

        Later steps go too: a run that saves 15 after 20 went back because 20 was refused.

        Args:
            step: Replaces an older checkpoint of the same step.
            write: Gets an empty folder to fill; the name `manifest.json` is taken.
            metrics: What `keep_best` and `best` compare.

        Returns:
            The checkpoint's folder.

        Raises:
            StoreError: If the disk refuses; older checkpoints then stay.
        """
        self.start(step, _WrittenAtOnce(write), metrics=metrics).wait()
        return self.path(step)

    def start(
        self, step: int, writer: BackgroundWriter, *, metrics: Mapping[str, float] | None = None
    ) -> PendingSave:
        """As `save`, in the background: a checkpoint is one of the run's when it is published.

        One at a time: an earlier one is waited for.

        Args:
            step: As for `save`.
            writer: Fills an empty folder; the name `manifest.json` is taken.
            metrics: As for `save`.

        Raises:
            StoreError: If the disk refuses; older checkpoints then stay.
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
        aside = _aside(path)
        with files.storage_errors(path):
            files.write_atomic(aside / MANIFEST, _manifest(step, aside, metrics, written))
            _checked.discard(path.resolve())
            _replace(path, synced=written.keys())
        kept = self._kept(step)
        for saved in self.steps():
            if saved not in kept:
                files.discard(self.path(saved))
        files.sweep_discarded(self.root)
        for tell in list(_told):
            tell(PublishedSave(path, written))

    def would_be_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether `keep_best` would keep a checkpoint with these metrics, saved now."""
        own = self._rank(step, metrics) if self.keep_best else None
        if own is None or self.keep_best is None:
            return False
        earlier = (self._rank(each, self._metrics(each)) for each in self.steps() if each < step)
        return sum(rank > own for rank in earlier if rank) < self.keep_best.count

    def _kept(self, step: int) -> set[int]:
        saved = [earlier for earlier in self.steps() if earlier <= step]
        best = self._ranked(saved)[: self.keep_best.count] if self.keep_best else []
        return {*saved[-self.keep_latest :], *best}

    def _ranked(self, steps: Iterable[int]) -> list[int]:
        """Steps that have the metric, best first; of equals, the newer."""
        ranks = (self._rank(step, self._metrics(step)) for step in steps)
        return [rank[1] for rank in sorted(filter(None, ranks), reverse=True)]

    def _rank(self, step: int, metrics: Mapping[str, Any]) -> tuple[float, int] | None:
        """The better, the larger; of equals, the newer. None without the metric."""
        assert self.keep_best is not None
        try:
            value = float(metrics[self.keep_best.metric])
        except (ValueError, KeyError, TypeError):
            return None  # of a step that was not validated
        sign = 1.0 if self.keep_best.mode == "max" else -1.0
        return None if math.isnan(value) else (sign * value, step)

    def _metrics(self, step: int) -> Mapping[str, Any]:
        try:
            metrics = json.loads((self.path(step) / MANIFEST).read_text())["metrics"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # a damaged one
        return metrics if isinstance(metrics, dict) else {}

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
        return self._first_whole(reversed(self.steps()), verify=verify)

    def best(self, *, verify: bool = True) -> tuple[int, Path] | None:
        """The whole checkpoint with the best metric of `keep_best`; refused ones are logged.

        None where no checkpoint was saved with that metric.
        """
        self._recover()
        return self._first_whole(self._ranked(self.steps()), verify=verify)

    def _first_whole(self, steps: Iterable[int], *, verify: bool) -> tuple[int, Path] | None:
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
        """Where the checkpoint of a step lies, or would."""
        return self.root / f"step-{step:08d}"

    def _recover(self) -> None:
        for old in self.root.glob(f".step-*{_OLD}"):
            recover(self.root / old.name.removeprefix(".").removesuffix(_OLD))
        if self._pending is None or self._pending.has_ended:
            # A killed process was writing these; nobody may ever save their steps again.
            for aside in self.root.glob(f".step-*.new{files.ASIDE}"):
                shutil.rmtree(aside, ignore_errors=True)


def _manifest(
    step: int, folder: Path, metrics: Mapping[str, float], written: Mapping[str, WrittenFile]
) -> str:
    entries = {}
    for name in files.list_files(folder):
        digest = written[name].sha256 if name in written else files.hash_file(folder / name)
        entries[name] = {"sha256": digest, "bytes": (folder / name).stat().st_size}
    return json.dumps({"step": step, "metrics": dict(metrics), "files": entries}, indent=1)


def _check(step: int, folder: Path, *, verify: bool) -> None:
    """Raises an OSError, ValueError, KeyError or TypeError unless the checkpoint is whole."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    if manifest["step"] != step:
        raise ValueError(f"its manifest is that of step {manifest['step']}")
    for name, entry in manifest["files"].items():
        path = resolve_below(folder, name, source=MANIFEST)
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}")
        if verify and files.hash_file(path) != entry["sha256"]:
            raise ValueError(f"the content of {name} has changed since it was saved")
