"""A stage's saved work in an object store: a file an object, and a manifest of the save.

    PREFIX/save.json           each file's path, sha256, size and object, and who wrote it;
                               earlier attempts of which something may be left
    PREFIX/files/SHA256        its content

The manifest is written last and replaced in one request, so that a save that was cut off is never
taken for one. Objects are named by their content: what has not changed since the save before, such
as the frozen weights under adapters, is not sent again.

An attempt takes over the save of the one before by a manifest of its own that names the other's
objects. They are removed as all others are: when no file of the newest save needs them. An attempt
that is killed before it removed them leaves that to the next, which reads where something is left.

At a stage's end the object store copies from these objects what its artifact has of the last save.
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
from nemo_rl_core.store.partial import SHA256
from nemo_rl_core.store.paths import checked_name, resolve_below

logger = logging.getLogger(__name__)

SAVE = "save.json"
_OBJECTS, _CHECKPOINTS = "files", "checkpoints"
_RESTORING = ".restoring"
"""Where files arrive; while it is there, what lies beside it may be incomplete."""

_NUM_STREAMS = 4
"""Files that one process sends or receives at once."""

_NUM_COPIES = 8
"""Objects that an object store copies at once for one process, which only waits; a client of S3 has
10 connections."""

LARGE_BYTES = 8 * 2**20
"""Files of this size and more are worth another machine, and are not hashed twice."""

_COPYING = {"s3", "s3a", "gs", "gcs", "file", "local", "memory"}
"""Protocols whose `cp_file` ends when the copy is whole, of any size. That of Azure (adlfs) only
starts one, and so its files are sent again."""

_PAUSES_SECONDS = (1.0, 5.0)
"""Between the attempts to transfer an object."""

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


@dataclass(frozen=True)
class StoredFile:
    """A file of a save.

    Attributes:
        sha256: Of its content.
        num_bytes: Its size.
        address: The object that has its content.
        machine: Of the process that wrote it, as `WrittenFile.machine`.
    """

    sha256: str
    num_bytes: int
    address: str
    machine: str = ""


@dataclass(frozen=True)
class Transfer:
    """A file to send or to receive.

    Attributes:
        path: On this machine's disk, or on the volume.
        file: Its object, size and digest.
        copied_from: An object of the same content, which `deliver` has copied in place of sending
            the file.
    """

    path: Path
    file: StoredFile
    copied_from: str = ""


_Identity = tuple[str, int, int, int]
"""Name, inode, size in bytes and time of change in ns: what a rename of a file's folder leaves."""


def _identity(path: Path) -> _Identity:
    state = path.stat()
    return path.name, state.st_ino, state.st_size, state.st_mtime_ns


Mover = Callable[[Callable[[Any, Sequence[Transfer]], None], Any, Sequence[Transfer]], None]
"""Calls a function with a file system and transfers, part by part, each where its file lies."""


class ObjectSaves:
    """The saves of one attempt at a prefix of an object store.

    Args:
        system: An `fsspec` file system, which other processes can be given.
        prefix: Of this attempt.
        move: Who transfers files; by default this process.
    """

    def __init__(self, system: Any, prefix: str, *, move: "Mover | None" = None) -> None:
        self._system, self._prefix, self._move = system, prefix.rstrip("/"), move or here
        self._files: dict[str, StoredFile] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._hashed: dict[_Identity, str] = {}
        self._earlier: list[str] = []

    def known_to(self, system: Any) -> dict[str, StoredFile]:
        """The files of the last save by their sha256, which another file system can copy.

        Args:
            system: Where to; empty where it is another, or cannot copy.
        """
        if system.protocol != self._system.protocol or not _copies(system):
            return {}
        return {each.sha256: each for each in self._files.values()}

    def hash_of(self, path: Path) -> str:
        """The sha256 of a file; one that the last save has sent is not read, if it is unchanged."""
        return self._hashed.get(_identity(path)) or files.hash_file(path)

    def take_over(self, previous: str) -> bool:
        """Makes the save of an earlier attempt the one of this attempt; nothing is copied.

        Returns:
            False if the earlier attempt has saved nothing.

        Raises:
            StoreError: If its manifest is damaged.
            TransferError: If the object store fails.
        """
        found = _read(self._system, previous.rstrip("/"))
        if found is None:
            return False
        self._files, earlier = found
        self._earlier = [*earlier, previous.rstrip("/")]
        self._write_manifest()
        return True

    def restore(self, folder: Path) -> None:
        """Downloads the save into a folder, each file's digest checked; killed, it can be repeated.

        Args:
            folder: The stage's work folder, without work of its own.

        Raises:
            StoreError: If an object is damaged, or the disk refuses.
            TransferError: If the object store fails.
        """
        arriving = folder / _RESTORING
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
        source = f"{self._prefix}/{SAVE}"
        self._transfer(
            receive,
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
        """Sends what a work folder holds that the object store lacks, and removes the rest there.

        Args:
            folder: The stage's work folder.
            published: The checkpoint in it that is new.

        Raises:
            TransferError: If the object store fails; the save before then stays whole.
        """
        address_of = {each.sha256: each.address for each in self._files.values()}
        with tempfile.TemporaryDirectory(dir=folder.parent) as copies:
            found = dict(self._describe(folder, published, Path(copies)))
            new: dict[str, Transfer] = {}
            for path, file in found.values():
                if file.sha256 not in address_of and file.sha256 not in new:
                    new[file.sha256] = Transfer(path, file)
            self._transfer(send, list(new.values()))
        self._files = {
            name: replace(file, address=address_of.get(file.sha256, file.address))
            for name, (_, file) in found.items()
        }
        self._write_manifest()
        self._hashed = {
            _identity(path): file.sha256
            for path, file in found.values()
            if file.num_bytes >= LARGE_BYTES and path.is_relative_to(folder / _CHECKPOINTS)
        }
        self._remove_unneeded()

    def _describe(
        self, folder: Path, published: manager.PublishedSave, copies: Path
    ) -> Iterator[tuple[str, tuple[Path, StoredFile]]]:
        """Each file of the folder by its name: where its content is now, and what it is."""
        names = files.list_files(folder)
        checkpoints = [name for name in names if name.startswith(f"{_CHECKPOINTS}/")]
        digests = _digests_of(folder, checkpoints)
        for name in checkpoints:
            path = folder / name
            digest = digests.get(name) or files.hash_file(path)
            machine = _machine_of(path, published) or self._known_machine(name)
            yield name, (path, self._stored(digest, path.stat().st_size, machine))
        # Checkpoints first: what is added to other files meanwhile belongs to later steps.
        for name in sorted(set(names) - set(checkpoints)):
            try:
                yield name, self._copied(folder, name, copies)
            except FileNotFoundError:
                continue  # replaced by the step that runs meanwhile

    def _copied(self, folder: Path, name: str, copies: Path) -> tuple[Path, StoredFile]:
        """A file that may grow meanwhile, as it is now."""
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

    def _known_machine(self, name: str) -> str:
        return self._files[name].machine if name in self._files else ""

    def _stored(self, digest: str, num_bytes: int, machine: str) -> StoredFile:
        return StoredFile(digest, num_bytes, f"{self._prefix}/{_OBJECTS}/{digest}", machine)

    def _transfer(
        self, how: Callable[[Any, Sequence[Transfer]], None], transfers: Sequence[Transfer]
    ) -> None:
        self._move(how, self._system, transfers)

    def _write_manifest(self) -> None:
        entries = {name: asdict(file) for name, file in sorted(self._files.items())}
        content = json.dumps({"files": entries, "earlier": self._earlier}).encode()
        with _failures(f"{self._prefix}/{SAVE}"):
            _put(self._system, f"{self._prefix}/{SAVE}", content)

    def _remove_unneeded(self) -> None:
        """Removes objects of earlier saves; one that the store keeps costs space, not the run."""
        needed = {each.address for each in self._files.values()}
        try:
            for earlier in self._earlier:
                # First: with fewer objects it is no save that an attempt could begin with.
                with suppress(FileNotFoundError):
                    self._system.rm(f"{earlier}/{SAVE}")
            there = {prefix: self._listed(prefix) for prefix in (*self._earlier, self._prefix)}
            if unneeded := sorted(set().union(*there.values()) - needed):
                self._system.rm(unneeded)
            self._earlier = [prefix for prefix in self._earlier if there[prefix] & needed]
        except OSError as error:
            logger.warning("earlier saves at %s could not be removed: %s", self._prefix, error)

    def _listed(self, prefix: str) -> set[str]:
        """The objects of an attempt, also those of a save that was cut off."""
        root = f"{prefix}/{_OBJECTS}"
        self._system.invalidate_cache()
        try:
            names = (PurePosixPath(path).name for path in self._system.ls(root, detail=False))
        except FileNotFoundError:
            return set()
        return {f"{root}/{name}" for name in names if SHA256.fullmatch(name)}


def is_to_be_restored(folder: Path) -> bool:
    """Whether a work folder has no work of its own, or a part of what was being restored."""
    return (folder / _RESTORING).exists() or not files.list_files(folder)


def here(
    how: Callable[[Any, Sequence[Transfer]], None], system: Any, transfers: Sequence[Transfer]
) -> None:
    """Transfers files in this process, some at once."""
    with ThreadPoolExecutor(_NUM_STREAMS, thread_name_prefix="save") as executor:
        for done in [executor.submit(how, system, [each]) for each in transfers]:
            done.result()


def send(system: Any, transfers: Sequence[Transfer]) -> None:
    """Sends files to their objects.

    Raises:
        TransferError: If the object store fails.
    """
    for each in transfers:
        _repeated(each.file.address, partial(system.put_file, str(each.path), each.file.address))


def deliver(system: Any, transfers: Sequence[Transfer]) -> None:
    """Sends files to their objects, and has the object store copy those whose content it has.

    Raises:
        TransferError: If the object store fails.
    """
    copies = [each for each in transfers if each.copied_from]
    with ThreadPoolExecutor(_NUM_COPIES, thread_name_prefix="copy") as executor:
        pending = [executor.submit(_copy, system, each) for each in copies]
        send(system, [each for each in transfers if not each.copied_from])
        for done in pending:
            done.result()


def _copy(system: Any, transfer: Transfer) -> None:
    source, target = transfer.copied_from, transfer.file.address
    _repeated(target, partial(system.cp_file, source, target))


def _copies(system: Any) -> bool:
    protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
    return bool(protocols & _COPYING)


def receive(system: Any, transfers: Sequence[Transfer]) -> None:
    """Receives files from their objects, each compared with its digest.

    Raises:
        StoreError: If an object is damaged, or the disk refuses.
        TransferError: If the object store fails.
    """
    for each in transfers:
        with files.written_aside(each.path) as aside:
            _repeated(each.file.address, partial(system.get_file, each.file.address, str(aside)))
            if (found := files.hash_file(aside)) != each.file.sha256:
                raise StoreError(
                    f"the saved file {each.file.address} is damaged",
                    expected=f"{each.file.num_bytes} bytes with sha256 {each.file.sha256[:12]}",
                    got=f"{aside.stat().st_size} bytes with {found[:12]}",
                    fix="run the same command again: the stage begins anew",
                )


def _repeated(address: str, transfer: Callable[[], object]) -> None:
    """Transfers an object, again after a pause where it broke off: a client repeats requests only.

    Raises:
        TransferError: If the last attempt fails.
    """
    for pause_seconds in _PAUSES_SECONDS:
        try:
            with _failures(address):
                transfer()
        except TransferError as error:
            logger.warning("%s; it is tried again", error.in_one_line)
            time.sleep(pause_seconds)
        else:
            return
    with _failures(address):
        transfer()


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Turns what an object store's client raises into an error that another attempt may not meet.

    A full disk is none of its errors.
    """
    try:
        yield
    except NemoRLError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise TransferError(
            f"the transfer of {address} broke off",
            got=f"{type(error).__name__}: {error}"[:500],
            fix="look at the object store and its credentials; the next attempt goes on from the "
            "save before",
        ) from error


def _put(system: Any, address: str, content: bytes) -> None:
    if "file" in system.protocol:  # which would be seen half written
        files.write_atomic(Path(address), content)
    else:
        system.pipe_file(address, content)


def _digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """From the manifests of the checkpoints, so that nothing is read again."""
    found: dict[str, str] = {}
    for name in names:
        place = PurePosixPath(name)
        if place.name == manager.MANIFEST and len(place.parts) == 3:
            entries = json.loads((folder / name).read_text())["files"]
            found |= {f"{place.parent}/{each}": entries[each]["sha256"] for each in entries}
    return found


def _machine_of(path: Path, published: manager.PublishedSave) -> str:
    if not path.is_relative_to(published.folder):
        return ""
    name = path.relative_to(published.folder).as_posix()
    return published.written.get(name, WrittenFile("", 0)).machine


def _read(system: Any, prefix: str) -> tuple[dict[str, StoredFile], list[str]] | None:
    """The files of a save, and the earlier attempts of which something may be left."""
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
            fix="remove it, and run the same command again: the stage begins anew",
        ) from error
