"""Download of the parts of an artifact that a stage reads, each file verified.

flytekit downloads a folder as a whole. Of a checkpoint most bytes are `trainer/`, the optimizer's
state and moments, which only the next iteration reads. Where nodes have a cache, what it has of the
content is not downloaded.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from flytekit.core.context_manager import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import partial
from nemo_rl_core.store.files import digest_of, hash_file, list_files
from nemo_rl_core.store.manifest import MANIFEST, Manifest
from nemo_rl_core.store.node_cache import FOLDER
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import is_volatile
from tasks.platform.kept_downloads import AT_ONCE, kept, sizes


def fetch(directory: FlyteDirectory, *parts: str) -> Path:
    """Downloads the files at the top of an artifact's folder, and some of its parts.

    What is here already is not downloaded again. An artifact of an earlier version, without
    digests of its files, is downloaded as a whole.

    Args:
        directory: The folder, here or in an object store.
        parts: Folders or files in it, as "model" or "trainer/state.json"; those that it does not
            have are ignored.

    Returns:
        The folder on this machine.

    Raises:
        StoreError: If a file is not the one that the stage has made.
    """
    folder = Path(directory.path)
    if not directory.remote_source:
        return folder
    if not (folder / partial.DIGESTS).exists():
        if not _fetch_top(directory, folder):
            _fetch_without_digests(directory, folder)
            return folder
        _fetched(directory, folder, [n for n in _digests(directory, folder) if "/" not in n])
    digests = _digests(directory, folder)
    for part in parts:
        names = [name for name in digests if name == part or name.startswith(f"{part}/")]
        if not all(_path(folder, name).exists() for name in names):
            _get_part(directory, folder, part, {name: digests[name] for name in names})
            _fetched(directory, folder, names)
    return folder


def fetch_whole(directory: FlyteDirectory) -> Path:
    """Downloads an artifact's folder; what is here already is not downloaded again.

    Raises:
        StoreError: If a file is not the one that the stage has made.
    """
    folder = fetch(directory)
    if not (folder / partial.LEFT_OUT).exists():
        return folder
    return fetch(directory, *sorted({name.partition("/")[0] for name in partial.left_out(folder)}))


def _fetch_top(directory: FlyteDirectory, folder: Path) -> bool:
    """Downloads the files at the top, the digests last; False if there are no digests."""
    system, source = _source(directory)
    entries = system.ls(source, detail=True)
    names = [Path(each["name"]).name for each in entries if each["type"] == "file"]
    if partial.DIGESTS not in names:
        return False
    known = _announced(system, source) if FOLDER in os.environ else {}
    here = kept(system, source, folder, {name: known[name] for name in names if name in known})
    _get(system, source, folder, {*names} - here - {partial.DIGESTS})
    _get(system, source, folder, {partial.DIGESTS} - here)
    return True


def _fetch_without_digests(directory: FlyteDirectory, folder: Path) -> None:
    """Downloads an artifact of an earlier version, the manifest last."""
    if (folder / MANIFEST).exists():
        return
    system, source = _source(directory)
    names = sizes(system, source).keys()
    _get(system, source, folder, names - {MANIFEST})
    _get(system, source, folder, names & {MANIFEST})


def _announced(system: Any, source: str) -> dict[str, str]:
    """The digests as the store has them, which are held against the manifest afterwards."""
    with suppress(ValueError, AttributeError, TypeError):
        found = json.loads(system.cat_file(f"{source.rstrip('/')}/{partial.DIGESTS}"))
        return {
            str(name): str(each)
            for name, each in found.items()
            if partial.SHA256.fullmatch(str(each))
        }
    return {}


def _get_part(
    directory: FlyteDirectory, folder: Path, part: str, digests: Mapping[str, str]
) -> None:
    """Downloads a file, or a folder with files of these digests, if the node does not have it."""
    system, source = _source(directory)
    stored = sizes(system, source, part).keys()
    if surplus := sorted(stored - digests.keys()):
        raise _damaged(directory, "; ".join(f"{name} is not part of it" for name in surplus[:5]))
    here = kept(system, source, folder, digests)
    _get(system, source, folder, (digests.keys() & stored) - here)


def _source(directory: FlyteDirectory) -> tuple[Any, str]:
    source = str(directory.remote_source)
    access = FlyteContextManager.current_context().file_access
    return access.get_filesystem_for_path(source), source


def _get(system: Any, source: str, folder: Path, names: Collection[str]) -> None:
    """Downloads files by their names; a client of an object store would take those it lists."""
    paths = {name: _path(folder, name) for name in sorted(names)}

    def get(name: str) -> None:
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        system.get_file(f"{source.rstrip('/')}/{name}", str(paths[name]))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(get, paths):
            pass


def _path(folder: Path, name: str) -> Path:
    # A link leads to the node's cache.
    return resolve_below(folder, name, source="the listing of an artifact", may_link=True)


def _digests(directory: FlyteDirectory, folder: Path) -> dict[str, str]:
    try:
        digests = partial.read_digests(folder)
    except ValueError as error:
        raise _damaged(directory, str(error)) from error
    if digest_of(digests) != Manifest.read(folder).content_hash:
        raise _damaged(directory, f"{partial.DIGESTS} is of another content than its manifest")
    return digests


def _fetched(directory: FlyteDirectory, folder: Path, names: Iterable[str]) -> None:
    """Verifies new files, and records which ones are still left out."""
    digests = _digests(directory, folder)
    problems = list(_differences(folder, {name: digests[name] for name in names}))
    here = set(list_files(folder))
    problems += [f"{n} is not of it" for n in here if n not in digests and not is_volatile(n)]
    if problems:
        raise _damaged(directory, "; ".join(sorted(problems)[:5]))
    partial.write_left_out(folder, {n: d for n, d in digests.items() if n not in here})


def _differences(folder: Path, expected: dict[str, str]) -> Iterator[str]:
    for name, digest in expected.items():
        path = _path(folder, name)
        if not path.is_file():
            yield f"{name} is missing"
        elif path.is_symlink():
            continue  # of the node's cache, which has verified it
        elif (found := hash_file(path)) != digest:
            yield f"the hash of {name} was {digest[:12]} and is {found[:12]}"


def _damaged(directory: FlyteDirectory, got: str) -> StoreError:
    return StoreError(
        f"the artifact in {directory.remote_source} is damaged",
        expected="the content that its stage made",
        got=got,
        fix="run the same command again with --overwrite-cache. A task of yours that edits an "
        "artifact has @cached_task and returns what make gives: docs/workflows.md",
    )
