"""What a stage reads of its parents, from the node's cache where that has it.

A stage without Ray reads the cached file itself, behind a link. What a Ray stage downloads lies on
the volume that its machines share, so there it is a copy.
"""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_rl_core.store.files import written_aside
from nemo_rl_core.store.node_cache import NodeCache
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

AT_ONCE = 4
"""Files on their way: a client of S3 computes 1 to 7 CPU seconds a GiB."""


def kept(system: Any, source: str, folder: Path, digests: Mapping[str, str]) -> set[str]:
    """Puts files of an artifact into its folder from the node's cache, which fetches what it lacks.

    Args:
        system: The `fsspec` file system of the source.
        source: The artifact's folder in the object store.
        folder: The same on this machine.
        digests: The sha256 of the files to put there, by relative path.

    Returns:
        The files that are there now. Without a cache, or room in it, there are none.
    """
    cache = NodeCache.of(os.environ)
    if cache is None or not digests:
        return set()
    stored = sizes(system, source)
    present = [name for name in digests if name in stored]
    for name in present:  # here, since threads would open the file of marks anew
        cache.mark(digests[name])
    is_shared = folder.is_relative_to(Store.default().inputs)

    def put(name: str) -> bool:
        address = f"{source.rstrip('/')}/{name}"
        found = cache.bring(
            digests[name], stored[name], lambda path: system.get_file(address, str(path))
        )
        if found is not None:
            path = resolve_below(folder, name, source="the listing of an artifact", may_link=True)
            _place(found, path, as_copy=is_shared)
        return found is not None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            name for name, is_put in zip(present, pool.map(put, present), strict=True) if is_put
        }


def sizes(system: Any, source: str, part: str = "") -> dict[str, int]:
    """The sizes of an artifact's files in the object store, by relative path.

    Args:
        system: The `fsspec` file system of the source.
        source: The artifact's folder in the object store.
        part: A file or folder of it; empty for all files.
    """
    top = f"{str(system._strip_protocol(source)).rstrip('/')}/"
    objects = system.find(f"{source.rstrip('/')}/{part}", detail=True)
    return {name.removeprefix(top): each["size"] for name, each in objects.items()}


def _place(found: Path, path: Path, *, as_copy: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if as_copy:
        with written_aside(path) as aside:
            shutil.copyfile(found, aside)
    elif not path.exists():
        path.unlink(missing_ok=True)  # a link to what is gone
        path.symlink_to(found)
