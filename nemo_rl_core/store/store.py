"""The store: a folder with everything that later runs can reuse.

Work in progress is in `work/<stage>-<key>` under a lock. A finished stage is renamed from there to
`artifacts/<stage>-<hash>`, which the record `work/<stage>-<key>.done` names. The record is written
before the rename and counts only if the artifact exists, so a kill between the two does no harm.

Parents and cached artifacts are verified against their manifests before use: each file is hashed
once, and again if it has changed. `nemo-rl verify` always reads every file, since a disk can damage
a file without changing its times.
"""

import errno
import functools
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import files, locks
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.manifest import (
    ANCESTORS,
    DIGESTS,
    LEFT_OUT,
    MANIFEST,
    Manifest,
    config_hash,
    left_out,
)
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.reads import changed_inputs, is_current, read_record, recorded_names

logger = logging.getLogger(__name__)

CARD = "README.md"
"""File name of a model's card. It names commit and machine, so hashes exclude it."""

VOLATILE = (
    MANIFEST,
    ANCESTORS,
    "metrics.jsonl",
    "finished.json",
    "stopped.json",
    "deck.html",
    "summary.txt",
    DIGESTS,
    LEFT_OUT,
    f"model/{CARD}",
)
"""Files with times, costs, hashes or the maker of an artifact; the content hash excludes them."""

HashOfFile = Callable[[Path], str]

_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EIO)
"""Errors for a file that is missing, replaced by something else, or lost by the disk."""

_SETTLED_NS = 2 * 10**9
"""Time resolution of some file systems: a younger file may change without a new time."""

_FileHash = tuple[int, int, int, int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
_HASHES = TypeAdapter(dict[str, _FileHash])

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Store:
    """A folder for artifacts, caches, runs and work in progress, created on first use.

    Example:
        >>> with store.work_folder("train_sft", key) as folder:            # doctest: +SKIP
        ...     path = store.published("train_sft", key)
        ...     if path is None:
        ...         train(folder)                                # resumes from saves in it
        ...         path = store.publish(folder, stage="train_sft", content_hash=digest)
    """

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).expanduser().resolve())

    @classmethod
    def default(cls) -> "Store":
        """Returns the store in NEMO_RL_HOME, else `~/.nemo_rl`."""
        return cls(Path(os.environ.get("NEMO_RL_HOME") or "~/.nemo_rl"))

    @property
    def artifacts(self) -> Path:
        """Artifacts of finished stages; read-only."""
        return self.root / "artifacts"

    @property
    def cache(self) -> Path:
        """The stage cache and downloads."""
        return self.root / "cache"

    @property
    def runs(self) -> Path:
        """One folder per run, with its log."""
        return self.root / "runs"

    @property
    def work(self) -> Path:
        """Stages in progress, with their locks."""
        return self.root / "work"

    @property
    def inputs(self) -> Path:
        """Downloads of stages on a cluster while they run."""
        return self.root / "inputs"

    @property
    def models(self) -> Path:
        """Models from other sources, in the HF layout."""
        return self.root / "models"

    @property
    def verified(self) -> Path:
        """Hashes of artifacts' files; see `HashCache`."""
        return self.cache / "verified"

    @property
    def reads(self) -> Path:
        """Inputs that user code read, one file per artifact; see `nemo_rl_core.store.reads`."""
        return self.root / "reads"

    @property
    def gpu_seconds(self) -> Path:
        """GPU-seconds of attempts on a cluster, by execution; see `telemetry.budget`."""
        return self.cache / "gpu_seconds"

    @property
    def damaged(self) -> Path:
        """Damaged artifacts and records that were moved away."""
        return self.root / "damaged"

    @property
    def marks(self) -> Path:
        """The file whose byte locks mark artifacts and runs in use; it stays empty."""
        return self.root / "in_use.lock"

    def create(self) -> None:
        """Creates the root with access only for this user; keeps an existing folder."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_writable(self, *, min_free_mib: int = 256) -> None:
        """Creates the folders and writes to each, so that a run fails early.

        Permission bits do not apply to root or show quotas, so a probe is written and synced.
        """
        for folder in (self.root, self.artifacts, self.cache, self.runs, self.work, self.models):
            try:
                self._probe(folder)
            except OSError as error:
                raise StoreError(
                    f"the store {self.root} cannot be written",
                    expected="a folder that this user may create and write",
                    got=str(error),
                    fix="point NEMO_RL_HOME at such a folder",
                ) from error
        free_mib = shutil.disk_usage(self.root).free / 2**20
        if free_mib < min_free_mib:
            raise StoreError(
                f"the disk of the store {self.root} is nearly full",
                expected=f"at least {min_free_mib} MiB free",
                got=f"{free_mib:.0f} MiB",
                fix="free some space, or point NEMO_RL_HOME at another disk",
            )

    def _probe(self, folder: Path) -> None:
        probe = folder / f".probe.{uuid.uuid4().hex[:8]}{files.ASIDE}"
        with files.storage_errors(folder):
            self.create()
            folder.mkdir(exist_ok=True)
            try:
                probe.write_bytes(b"\0" * 4096)
                files.fsync(probe)
            finally:
                probe.unlink(missing_ok=True)

    @contextmanager
    def work_folder(self, stage: str, key: str) -> Iterator[Path]:
        """Locks and yields the work folder of a stage with these inputs.

        It may have files of an earlier, killed process. A second process waits until the first
        ends; call `published` next, since the first may have finished the stage.
        """
        folder = self.work / _work_name(stage, key)
        with files.storage_errors(folder):
            self.create()
            self.work.mkdir(exist_ok=True)
        with locks.locked(folder.with_name(folder.name + ".lock"), stage):
            files.sweep_discarded(self.work)
            with files.storage_errors(folder):
                for torn in self.work.glob(f".{_record_path(folder).name}.*{files.ASIDE}"):
                    torn.unlink()
                if folder.exists() and self.published(stage, key):
                    files.discard(folder)  # a process was killed while deleting a duplicate
                folder.mkdir(exist_ok=True)
            try:
                yield folder
            finally:
                _remove_if_empty(folder)

    def publish(self, folder: Path, *, stage: str, content_hash: str) -> Path:
        """Turns a work folder into an artifact atomically; call it inside `work_folder`.

        An existing artifact with this hash of at least 16 characters is kept; `folder` is deleted.
        """
        if folder.parent != self.work or not folder.name.startswith(f"{stage}-"):
            raise ValueError(f"{folder} is not a work folder of stage {stage!r} in {self.work}")
        if not re.fullmatch(r"[A-Za-z0-9]{16,}", content_hash):
            raise ValueError(f"content_hash must be 16 or more letters or digits: {content_hash!r}")
        target = self.artifacts / artifact_name(stage, content_hash)
        with files.storage_errors(target):
            files.remove_leftovers(folder)
            files.fsync_tree(folder)
            self.artifacts.mkdir(parents=True, exist_ok=True)
            names = [name for name in recorded_names(_record_path(folder)) if name != target.name]
            record = {"artifact": target.name, "content_hash": content_hash, "earlier": names[:31]}
            files.write_atomic(_record_path(folder), json.dumps(record))
            self.hold(target)
            try:
                folder.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
                    raise
                files.discard(folder)
            files.fsync(self.artifacts)
            files.fsync(self.work)
        return target

    def published(self, stage: str, key: str) -> Path | None:
        """Returns the artifact of a stage with these inputs, locked as in `hold`; None without any.

        An artifact does not count if files or variables that its user code read have changed.
        """
        artifact = self._recorded(stage, key)
        return artifact if artifact is not None and self.hold(artifact) else None

    def discard_published(
        self, stage: str, key: str, *, is_unwanted: Callable[[Manifest], bool]
    ) -> None:
        """Deletes the artifact of these inputs if it is unwanted and no process uses it.

        Call it inside `work_folder`, before `published`. A damaged manifest stays.
        """
        artifact = self._recorded(stage, key)
        if artifact is None:
            return
        try:
            manifest = Manifest.read(artifact)
        except StoreError:
            return
        if not is_unwanted(manifest):
            return
        with locks.exclusive(self.marks, f"artifacts/{artifact.name}") as is_free:
            if is_free:
                files.discard(artifact)

    def _recorded(self, stage: str, key: str) -> Path | None:
        record = _record_path(self.work / _work_name(stage, key))
        artifacts = (
            resolve_below(self.artifacts, name, source=record.name)
            for name in recorded_names(record)
        )
        return next((each for each in artifacts if each.is_dir() and self.is_current(each)), None)

    def is_current(self, artifact: Path) -> bool:
        """Whether all inputs that user code read for an artifact are unchanged."""
        return is_current(self.reads / f"{artifact.name}.json")

    def changed_inputs(self, stage: str, key: str) -> list[str]:
        """Returns inputs of user code that changed since the newest artifact of a stage."""
        for name in recorded_names(_record_path(self.work / _work_name(stage, key))):
            record = resolve_below(self.reads, f"{name}.json", source="a record of a stage")
            for reads in read_record(record):
                return changed_inputs(reads)
        return []

    def set_aside(self, path: Path) -> Path:
        """Moves a damaged artifact or record into `damaged/`; returns its new path."""
        aside = self.damaged / f"{path.name}.{uuid.uuid4().hex[:8]}"
        with files.storage_errors(path):
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
            files.fsync(aside.parent)
            files.fsync(path.parent)
        return aside

    def hold(self, folder: Path) -> bool:
        """Protects an artifact or a run's folder from `nemo-rl gc` while this process uses it.

        Returns:
            True if the folder exists. It stays until this process ends or calls `release`, unless
            its stage finds it damaged and rebuilds it.
        """
        if folder.is_relative_to(self.root):
            locks.share(self.marks, folder.relative_to(self.root).as_posix())
        return folder.is_dir()

    def release(self) -> None:
        """Releases all folders of `hold`, at the end of a run."""
        locks.unshare(self.marks)


class HashCache:
    """Hashes an artifact's files, and reads a file again only if size, times or inode differ.

    Without it, a rerun of a finished recipe would spend most of its time on hashing.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._cached = _read_cache(path)
        self._used: dict[str, _FileHash] = {}

    def __call__(self, path: Path) -> str:
        """Returns the SHA-256 digest of a file of the folder, in hex."""
        name = path.relative_to(self._folder).as_posix()
        now, identity = time.time_ns(), _identity(path)
        entry = self._cached.get(name)
        is_unchanged = entry is not None and entry[:4] == identity
        digest = entry[4] if entry and is_unchanged else hash_file(path)
        is_settled = now - identity[2] > _SETTLED_NS
        if is_settled and _identity(path) == identity:
            self._used[name] = (*identity, digest)
        return digest

    def save(self) -> None:
        """Writes the hashes that were used, if they differ from the file."""
        if self._used != self._cached:
            files.write_atomic(self._path, json.dumps(self._used))


def _read_cache(path: Path) -> dict[str, _FileHash]:
    try:
        return _HASHES.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Size, times and inode; programs cannot set the time of the last inode change (ctime)."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def artifact_name(stage: str, content_hash: str) -> str:
    """Returns the name of the folder that `Store.publish` creates."""
    return f"{stage}-{content_hash[:16]}"


def _work_name(stage: str, key: str) -> str:
    if not _NAME.fullmatch(stage) or not _NAME.fullmatch(key):
        raise ValueError(f"stage and key must be plain file names: {stage!r}, {key!r}")
    return f"{stage}-{key}"


def _record_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".done")


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        logger.debug("%s stays: it contains work, or was published", folder)


def content_digests(folder: Path, hash_of: HashOfFile = hash_file) -> dict[str, str]:
    """Returns the sha256 of each file in the content hash, including those not downloaded."""
    return {**left_out(folder), **files.hash_files(folder, exclude=VOLATILE, hash_of=hash_of)}


def hash_content(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """Computes the `content_hash` of an artifact's manifest."""
    return files.digest_of(content_digests(folder, hash_of))


def hash_weights(folder: Path, hash_of: HashOfFile = hash_file) -> str | None:
    """Computes the `weights_hash` of an artifact's manifest; None without a model."""
    model, prefix = folder / "model", "model/"
    digests = {
        name.removeprefix(prefix): digest
        for name, digest in left_out(folder).items()
        if name.startswith(prefix)
    }
    if model.is_dir():
        digests |= files.hash_files(model, exclude=(CARD,), hash_of=hash_of)
    return files.digest_of(digests) if digests or model.is_dir() else None


def damage(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """Describes the damage of an artifact in one line; empty if it is intact.

    Raises:
        OSError: If the folder cannot be read for another reason, such as too many open files.
        StoreError: If the manifest cannot be read for such a reason.
    """
    try:
        manifest = Manifest.read(folder)
        # Weights are part of the content; the cache avoids reading files twice.
        return "; ".join(_differences(folder, manifest, functools.cache(hash_of)))
    except (OSError, StoreError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno not in _LOST:
            raise
        return error.in_one_line if isinstance(error, StoreError) else f"cannot be read: {error}"


def _differences(folder: Path, manifest: Manifest, hash_of: HashOfFile) -> Iterator[str]:
    if manifest.config or manifest.config_hash:
        config = config_hash(manifest.config)
        if config != manifest.config_hash:
            yield _differs("settings", manifest.config_hash, config)
    content = hash_content(folder, hash_of)
    if content != manifest.content_hash:
        yield _differs("content", manifest.content_hash, content)
    if manifest.weights_hash is not None:
        weights = hash_weights(folder, hash_of) or "no model/"
        if weights != manifest.weights_hash:
            yield _differs("weights", manifest.weights_hash, weights)


def _differs(part: str, recorded: str, actual: str) -> str:
    return f"the hash of its {part} was {recorded[:12]} and is {actual[:12]}"


def damage_of_changed_files(store: Store, folder: Path) -> str:
    """The same as `damage`, but reads only files that changed since they were last hashed."""
    if folder.parent != store.artifacts:
        return damage(folder)
    hashes = HashCache(folder, store.verified / f"{folder.name}.json")
    if damage(folder, hashes):
        # The cache itself may be damaged, so the files decide.
        return damage(folder)
    hashes.save()
    return ""


def set_aside_damaged(store: Store, folder: Path) -> bool:
    """Moves a damaged artifact to `damaged/` with a warning; call it inside `work_folder`.

    The stage's lock keeps a second process from moving the artifact that the first rebuilt. A
    process that reads the damaged artifact keeps its open files, but cannot open others.
    """
    problem = damage_of_changed_files(store, folder) if folder.is_dir() else ""
    if not problem:
        return False
    aside = store.set_aside(folder)
    logger.warning("%s is damaged and is rebuilt: %s; moved to %s", folder.name, problem, aside)
    return True


def refuse_damaged(store: Store, folder: Path) -> None:
    """Raises if an artifact that a stage is about to read is damaged."""
    problem = damage_of_changed_files(store, folder)
    if problem:
        is_stored = folder.is_relative_to(store.root)
        edit = "edit an artifact in a task with @cached_task that returns the result of make"
        raise StoreError(
            f"the artifact in {folder} {'is damaged' if is_stored else 'has changed'}",
            expected="the content that its stage wrote",
            got=problem,
            fix=f"run the same command again, which rebuilds it; on a cluster with "
            f"--overwrite-cache. If one of your tasks changed it: {edit} (docs/workflows.md)"
            if is_stored
            else f"{edit} (docs/workflows.md), or copy it from its store again",
        )
