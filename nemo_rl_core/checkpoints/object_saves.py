"""A stage's saved work in an object store: one object per file, and a manifest of the save.

    PREFIX/save.json           each file's path, sha256, size, object and writer;
                               earlier attempts that may have left objects
    PREFIX/files/SHA256        content of a file

The manifest is written last and replaced in one request, so an interrupted save never counts as
complete. Objects are named by their content: files that have not changed since the previous save,
such as the frozen weights under adapters, are not sent again.

An attempt takes over the save of the previous attempt by writing a manifest that names the other's
objects. Objects are removed when no file of the newest save needs them; if an attempt is killed
before that, the next one removes them.
"""

import errno
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_rl_core.checkpoints import manager
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.errors import NemoRLError, StoreError, TransferError
from nemo_rl_core.store import files
from nemo_rl_core.store.manifest import SHA256
from nemo_rl_core.store.paths import checked_name, resolve_below

logger = logging.getLogger(__name__)

SAVE = "save.json"
_OBJECTS, _CHECKPOINTS = "files", "checkpoints"
_RESTORING = ".restoring"
"""Folder in which files arrive; while it exists, the folder around it may be incomplete."""

_NUM_STREAMS = 4
"""Files that one process sends or receives at once."""

_NUM_COPIES = 8
"""Concurrent copies within the object store per process, which only waits for them; an S3 client
has 10 connections."""

LARGE_BYTES = 8 * 2**20
"""Files of at least this size may be sent by any machine that has them, and are hashed once."""

_COPYING = {"s3", "s3a", "gs", "gcs", "file", "local", "memory"}
"""Protocols whose `cp_file` returns when the copy is complete, for any size. Azure's (adlfs) only
starts the copy, so its files are sent again."""

_PAUSES_SECONDS = (1.0, 5.0)
"""Pauses between the attempts to transfer an object."""

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


@dataclass(frozen=True)
class StoredFile:
    """A file of a save."""

    sha256: str
    num_bytes: int
    address: str
    machine: str = ""


@dataclass(frozen=True)
class Transfer:
    """A file to send or to receive."""

    path: Path
    file: StoredFile
    copied_from: str = ""


_Identity = tuple[str, int, int, int]
"""Name, inode, size in bytes and mtime in ns: unchanged when a file's folder is renamed."""


def _identity(path: Path) -> _Identity:
    state = path.stat()
    return path.name, state.st_ino, state.st_size, state.st_mtime_ns


Mover = Callable[[Callable[[Any, Sequence[Transfer]], None], Any, Sequence[Transfer]], None]
"""Calls a function with a file system and parts of the transfers, on the machines of the files."""


class ObjectSaves:
    """The saves of one attempt at a prefix of an object store.

    Args:
        system: An `fsspec` file system that can be sent to other processes.
    """

    def __init__(self, system: Any, prefix: str, *, move: "Mover | None" = None) -> None:
        self._system, self._prefix = system, prefix.rstrip("/")
        self._move = move or transfer_in_this_process
        self._files: dict[str, StoredFile] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._hashed: dict[_Identity, str] = {}
        self._earlier: list[str] = []

    def copyable_to(self, system: Any) -> dict[str, StoredFile]:
        """Returns the files of the last save that `system` can copy, by sha256."""
        protocol = system.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if protocol != self._system.protocol or not protocols & _COPYING:
            return {}
        return {each.sha256: each for each in self._files.values()}

    def hash_of(self, path: Path) -> str:
        """Returns the sha256 of a file, reusing that of the last save if unchanged."""
        return self._hashed.get(_identity(path)) or files.hash_file(path)

    def take_over(self, previous: str) -> bool:
        """Takes over the save of an earlier attempt without copying; False if it saved nothing."""
        manifest = _read(self._system, previous.rstrip("/"))
        if manifest is None:
            return False
        self._files, earlier = manifest
        self._earlier = [*earlier, previous.rstrip("/")]
        self._write_manifest()
        return True

    def restore(self, folder: Path) -> None:
        """Downloads the save into an empty work folder and checks digests; can be repeated."""
        arriving = folder / _RESTORING
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
        source = f"{self._prefix}/{SAVE}"
        self._move(
            receive,
            self._system,
            [
                Transfer(resolve_below(arriving, name, source=source), file)
                for name, file in self._files.items()
            ],
        )
        with files.storage_errors(folder):
            for entry in sorted(arriving.iterdir()):
                target = folder / entry.name
                shutil.rmtree(target, ignore_errors=True)
                entry.replace(target)
            arriving.rmdir()
        for checkpoint in (folder / _CHECKPOINTS).glob("step-*"):
            manager.trust(checkpoint)  # its files have just been compared

    def save(self, folder: Path, published: manager.PublishedSave) -> None:
        """Sends new files of a stage's work folder to the object store; removes unneeded objects.

        If the object store fails, the previous save stays complete.
        """
        address_of = {each.sha256: each.address for each in self._files.values()}
        with tempfile.TemporaryDirectory(dir=folder.parent) as copies:
            current = dict(self._describe(folder, published, Path(copies)))
            new: dict[str, Transfer] = {}
            for path, file in current.values():
                if file.sha256 not in address_of and file.sha256 not in new:
                    new[file.sha256] = Transfer(path, file)
            self._move(send, self._system, list(new.values()))
        self._files = {
            name: replace(file, address=address_of.get(file.sha256, file.address))
            for name, (_, file) in current.items()
        }
        self._write_manifest()
        self._hashed = {
            _identity(path): file.sha256
            for path, file in current.values()
            if file.num_bytes >= LARGE_BYTES and path.is_relative_to(folder / _CHECKPOINTS)
        }
        self._remove_unneeded()

    def _describe(
        self, folder: Path, published: manager.PublishedSave, copies: Path
    ) -> Iterator[tuple[str, tuple[Path, StoredFile]]]:
        """Yields each file of the folder: its name, the path of its content, its description."""
        names = files.list_files(folder)
        checkpoints = [name for name in names if name.startswith(f"{_CHECKPOINTS}/")]
        digests = _digests_of(folder, checkpoints)
        for name in checkpoints:
            path = folder / name
            digest = digests.get(name) or files.hash_file(path)
            earlier = self._files[name].machine if name in self._files else ""
            machine = _machine_of(path, published) or earlier
            yield name, (path, self._stored(digest, path.stat().st_size, machine))
        # Checkpoints first: text that is appended to other files meanwhile belongs to later steps.
        for name in sorted(set(names) - set(checkpoints)):
            try:
                yield name, self._copied(folder, name, copies)
            except FileNotFoundError:
                continue  # replaced by the step that is running

    def _copied(self, folder: Path, name: str, copies: Path) -> tuple[Path, StoredFile]:
        path = folder / name
        state = path.stat()
        seen = (state.st_size, state.st_mtime_ns)
        if name in self._files and self._seen.get(name) == seen:
            return path, self._files[name]
        copy = copies / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        self._seen[name] = seen
        return copy, self._stored(files.hash_file(copy), copy.stat().st_size, "")

    def _stored(self, digest: str, num_bytes: int, machine: str) -> StoredFile:
        return StoredFile(digest, num_bytes, f"{self._prefix}/{_OBJECTS}/{digest}", machine)

    def _write_manifest(self) -> None:
        entries = {name: asdict(file) for name, file in sorted(self._files.items())}
        content = json.dumps({"files": entries, "earlier": self._earlier}).encode()
        address = f"{self._prefix}/{SAVE}"
        with _failures(address):
            if "file" in self._system.protocol:  # others could see a half-written file
                files.write_atomic(Path(address), content)
            else:
                self._system.pipe_file(address, content)

    def _remove_unneeded(self) -> None:
        """Removes objects of earlier saves; only logs a failure, since it only costs space."""
        needed = {each.address for each in self._files.values()}
        try:
            for earlier in self._earlier:
                # The manifest first: otherwise an attempt could find one whose objects are gone.
                with suppress(FileNotFoundError):
                    self._system.rm(f"{earlier}/{SAVE}")
            objects = {prefix: self._listed(prefix) for prefix in (*self._earlier, self._prefix)}
            if unneeded := sorted(set().union(*objects.values()) - needed):
                self._system.rm(unneeded)
            self._earlier = [prefix for prefix in self._earlier if objects[prefix] & needed]
        except OSError as error:
            logger.warning("earlier saves at %s could not be removed: %s", self._prefix, error)

    def _listed(self, prefix: str) -> set[str]:
        """Returns the objects of an attempt, including those of an interrupted save."""
        root = f"{prefix}/{_OBJECTS}"
        self._system.invalidate_cache()
        try:
            names = (PurePosixPath(path).name for path in self._system.ls(root, detail=False))
        except FileNotFoundError:
            return set()
        return {f"{root}/{name}" for name in names if SHA256.fullmatch(name)}


def is_to_be_restored(folder: Path) -> bool:
    """Whether a work folder is empty or was only partly restored."""
    return (folder / _RESTORING).exists() or not files.list_files(folder)


def transfer_in_this_process(
    function: Callable[[Any, Sequence[Transfer]], None], system: Any, transfers: Sequence[Transfer]
) -> None:
    """Transfers files in this process, a few at once."""
    with ThreadPoolExecutor(_NUM_STREAMS, thread_name_prefix="save") as executor:
        for done in [executor.submit(function, system, [each]) for each in transfers]:
            done.result()


def send(system: Any, transfers: Sequence[Transfer]) -> None:
    """Sends files to their objects."""
    for each in transfers:
        _with_retries(
            each.file.address, partial(system.put_file, str(each.path), each.file.address)
        )


def deliver(system: Any, transfers: Sequence[Transfer]) -> None:
    """Sends files to their objects; the object store copies files whose content it already has."""
    copies = [each for each in transfers if each.copied_from]
    with ThreadPoolExecutor(_NUM_COPIES, thread_name_prefix="copy") as executor:
        pending = [
            executor.submit(
                _with_retries,
                each.file.address,
                partial(system.cp_file, each.copied_from, each.file.address),
            )
            for each in copies
        ]
        send(system, [each for each in transfers if not each.copied_from])
        for done in pending:
            done.result()


def receive(system: Any, transfers: Sequence[Transfer]) -> None:
    """Receives files from their objects, each compared with its digest."""
    for each in transfers:
        with files.written_aside(each.path) as aside:
            _with_retries(
                each.file.address, partial(system.get_file, each.file.address, str(aside))
            )
            if (digest := files.hash_file(aside)) != each.file.sha256:
                raise StoreError(
                    f"the saved file {each.file.address} is damaged",
                    expected=f"{each.file.num_bytes} bytes with sha256 {each.file.sha256[:12]}",
                    got=f"{aside.stat().st_size} bytes with {digest[:12]}",
                    fix="run the same command again; the stage restarts from the beginning",
                )


def _with_retries(address: str, transfer: Callable[[], object]) -> None:
    """Transfers an object; retries after a pause, since a client only retries single requests."""
    for pause_seconds in _PAUSES_SECONDS:
        try:
            with _failures(address):
                transfer()
        except TransferError as error:
            logger.warning("%s; trying again", error.in_one_line)
            time.sleep(pause_seconds)
        else:
            return
    with _failures(address):
        transfer()


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Turns errors of an object store's client into a `TransferError`, which may be transient.

    Errors of the disk pass through unchanged.
    """
    try:
        yield
    except NemoRLError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        raise TransferError(
            f"the transfer of {address} was interrupted",
            got=f"{type(error).__name__}: {error}"[:500],
            fix="check the object store and its credentials; the next attempt resumes from the "
            "previous save",
        ) from error


def _digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Reads digests from the manifests of the checkpoints, so that no file is read again."""
    digests: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.name == manager.MANIFEST and len(path.parts) == 3:
            entries = json.loads((folder / name).read_text())["files"]
            digests |= {f"{path.parent}/{each}": entries[each]["sha256"] for each in entries}
    return digests


def _machine_of(path: Path, published: manager.PublishedSave) -> str:
    if not path.is_relative_to(published.folder):
        return ""
    name = path.relative_to(published.folder).as_posix()
    return published.written.get(name, WrittenFile("", 0)).machine


def _read(system: Any, prefix: str) -> tuple[dict[str, StoredFile], list[str]] | None:
    """Returns the files of a save, and the earlier attempts that may have left objects."""
    with _failures(f"{prefix}/{SAVE}"):
        try:
            content = system.cat_file(f"{prefix}/{SAVE}")
        except FileNotFoundError:
            return None
    try:
        manifest = json.loads(content)
        stored = {
            checked_name(name, source=SAVE): StoredFile(**each)
            for name, each in manifest["files"].items()
        }
        for each in stored.values():
            if not SHA256.fullmatch(each.sha256) or not each.address.endswith(
                f"/{_OBJECTS}/{each.sha256}"
            ):
                raise ValueError(f"{each.address[:200]} is not an object of a save")
        return stored, [str(prefix) for prefix in manifest.get("earlier", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"the manifest of the save {prefix}/{SAVE} is damaged",
            expected="a JSON object with files, each with sha256, num_bytes, address and machine",
            got=f"{type(error).__name__}: {error}"[:300],
            fix="remove it, and run the same command again; the stage restarts from the beginning",
        ) from error
