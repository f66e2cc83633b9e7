"""Download of the parts of an artifact that a stage reads, each file verified.

flytekit downloads the complete folder. Most bytes of a checkpoint are in `trainer/`, the state of
the optimizer, which only the next iteration reads.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from flytekit.core.context_manager import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import digest_of, hash_file, list_files, written_aside
from nemo_rl_core.store.manifest import (
    DIGESTS,
    LEFT_OUT,
    MANIFEST,
    SHA256,
    Manifest,
    left_out,
    read_digests,
    write_left_out,
)
from nemo_rl_core.store.node_cache import FOLDER, NodeCache
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import VOLATILE, Store

_AT_ONCE = 4
"""Concurrent downloads of files: a client of S3 takes 1 to 7 CPU-seconds per GiB."""


def fetch(directory: FlyteDirectory, *parts: str) -> Path:
    """Downloads the files at the top of an artifact's folder, and those of its parts that exist.

    Existing files are not downloaded again. An artifact of an earlier version, without digests of
    its files, is downloaded completely. Parts are folders or files, as "trainer/state.json".
    """
    folder = Path(directory.path)
    if not directory.remote_source:
        return folder
    if not (folder / DIGESTS).exists():
        if not _fetch_top(directory, folder):
            _fetch_without_digests(directory, folder)
            return folder
        _check_fetched(directory, folder, [n for n in _digests(directory, folder) if "/" not in n])
    digests = _digests(directory, folder)
    for part in parts:
        names = [name for name in digests if name == part or name.startswith(f"{part}/")]
        if not all(_path(folder, name).exists() for name in names):
            _get_part(directory, folder, part, {name: digests[name] for name in names})
            _check_fetched(directory, folder, names)
    return folder


def fetch_whole(directory: FlyteDirectory) -> Path:
    """Downloads an artifact's folder; existing files are not downloaded again."""
    folder = fetch(directory)
    if not (folder / LEFT_OUT).exists():
        return folder
    return fetch(directory, *sorted({name.partition("/")[0] for name in left_out(folder)}))


def _fetch_top(directory: FlyteDirectory, folder: Path) -> bool:
    """Downloads the files at the top, the digests last; False without digests."""
    system, source = _source(directory)
    entries = system.ls(source, detail=True)
    names = [Path(each["name"]).name for each in entries if each["type"] == "file"]
    if DIGESTS not in names:
        return False
    announced = _announced(system, source) if FOLDER in os.environ else {}
    digests = {name: announced[name] for name in names if name in announced}
    cached = _from_node_cache(system, source, folder, digests)
    _get(system, source, folder, {*names} - cached - {DIGESTS})
    _get(system, source, folder, {DIGESTS} - cached)
    return True


def _fetch_without_digests(directory: FlyteDirectory, folder: Path) -> None:
    """Downloads an artifact of an earlier version, the manifest last."""
    if (folder / MANIFEST).exists():
        return
    system, source = _source(directory)
    names = _sizes(system, source).keys()
    _get(system, source, folder, names - {MANIFEST})
    _get(system, source, folder, names & {MANIFEST})


def _announced(system: Any, source: str) -> dict[str, str]:
    """Reads the digests from the object store; they are compared with the manifest afterwards."""
    with suppress(ValueError, AttributeError, TypeError):
        digests = json.loads(system.cat_file(f"{source.rstrip('/')}/{DIGESTS}"))
        return {
            str(name): str(each) for name, each in digests.items() if SHA256.fullmatch(str(each))
        }
    return {}


def _get_part(
    directory: FlyteDirectory, folder: Path, part: str, digests: Mapping[str, str]
) -> None:
    system, source = _source(directory)
    stored = _sizes(system, source, part).keys()
    if surplus := sorted(stored - digests.keys()):
        raise _damaged(directory, "; ".join(f"{name} is not part of it" for name in surplus[:5]))
    cached = _from_node_cache(system, source, folder, digests)
    _get(system, source, folder, (digests.keys() & stored) - cached)


def _from_node_cache(
    system: Any, source: str, folder: Path, digests: Mapping[str, str]
) -> set[str]:
    """Puts files into the folder from the node's cache, which fetches missing ones.

    A stage without Ray gets a link to the cached file. A Ray stage downloads to the volume that its
    machines share, so it gets a copy. Without a cache, or space in it, no file is returned.
    """
    cache = NodeCache.of(os.environ)
    if cache is None or not digests:
        return set()
    stored = _sizes(system, source)
    present = [name for name in digests if name in stored]
    for name in present:  # not in the threads, each of which would open the file of marks again
        cache.mark(digests[name])
    is_shared = folder.is_relative_to(Store.default().inputs)

    def put(name: str) -> bool:
        address = f"{source.rstrip('/')}/{name}"
        cached = cache.bring(
            digests[name], stored[name], lambda path: system.get_file(address, str(path))
        )
        if cached is not None:
            _put_in_place(cached, _path(folder, name), as_copy=is_shared)
        return cached is not None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {
            name for name, is_put in zip(present, pool.map(put, present), strict=True) if is_put
        }


def _sizes(system: Any, source: str, part: str = "") -> dict[str, int]:
    top = f"{str(system._strip_protocol(source)).rstrip('/')}/"
    objects = system.find(f"{source.rstrip('/')}/{part}", detail=True)
    return {name.removeprefix(top): each["size"] for name, each in objects.items()}


def _put_in_place(found: Path, path: Path, *, as_copy: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if as_copy:
        with written_aside(path) as aside:
            shutil.copyfile(found, aside)
    elif not path.exists():
        path.unlink(missing_ok=True)  # a dangling link
        path.symlink_to(found)


def _source(directory: FlyteDirectory) -> tuple[Any, str]:
    source = str(directory.remote_source)
    access = FlyteContextManager.current_context().file_access
    return access.get_filesystem_for_path(source), source


def _get(system: Any, source: str, folder: Path, names: Collection[str]) -> None:
    """Downloads files by name; a client of an object store would download those that it lists."""
    paths = {name: _path(folder, name) for name in sorted(names)}

    def get(name: str) -> None:
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        system.get_file(f"{source.rstrip('/')}/{name}", str(paths[name]))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(get, paths):
            pass


def _path(folder: Path, name: str) -> Path:
    # A link leads to the node's cache.
    return resolve_below(folder, name, source="the listing of an artifact", may_link=True)


def _digests(directory: FlyteDirectory, folder: Path) -> dict[str, str]:
    try:
        digests = read_digests(folder)
    except ValueError as error:
        raise _damaged(directory, str(error)) from error
    if digest_of(digests) != Manifest.read(folder).content_hash:
        raise _damaged(directory, f"{DIGESTS} does not match its manifest")
    return digests


def _check_fetched(directory: FlyteDirectory, folder: Path, names: Iterable[str]) -> None:
    digests = _digests(directory, folder)
    problems = list(_differences(folder, {name: digests[name] for name in names}))
    present = set(list_files(folder))
    problems += [
        f"{n} is not part of it" for n in present if n not in digests and n not in VOLATILE
    ]
    if problems:
        raise _damaged(directory, "; ".join(sorted(problems)[:5]))
    write_left_out(folder, {n: d for n, d in digests.items() if n not in present})


def _differences(folder: Path, expected: dict[str, str]) -> Iterator[str]:
    for name, digest in expected.items():
        path = _path(folder, name)
        if not path.is_file():
            yield f"{name} is missing"
        elif path.is_symlink():
            continue  # in the node's cache, which has verified it
        elif (actual := hash_file(path)) != digest:
            yield f"the hash of {name} was {digest[:12]} and is {actual[:12]}"


def _damaged(directory: FlyteDirectory, got: str) -> StoreError:
    return StoreError(
        f"the artifact in {directory.remote_source} is damaged",
        expected="the content that its stage wrote",
        got=got,
        fix="run the same command again with --overwrite-cache. A task of yours that edits an "
        "artifact needs @cached_task and returns the result of make: docs/workflows.md",
    )
