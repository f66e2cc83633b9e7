"""Maintenance of flytekit's local cache.

Read with protobuf only: importing flytekit takes longer than the clean-up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from diskcache import Cache, Disk
from diskcache.core import MODE_PICKLE
from flyteidl.core.literals_pb2 import Literal, LiteralCollection, LiteralMap

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store


class PlainDisk(Disk):
    """Entries of a cache without pickles: flytekit stores strings and bytes only."""

    def get(self, key: Any, raw: bool) -> Any:
        """Returns a key."""
        if not raw:
            raise self._pickled()
        return super().get(key, raw)

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> Any:
        """Returns a value."""
        if mode == MODE_PICKLE:
            raise self._pickled()
        return super().fetch(mode, filename, value, read)

    def _pickled(self) -> StoreError:
        return StoreError(
            f"the stage cache {self._directory} has a pickled entry, which could run any code",
            expected="strings and bytes, as runs write them",
            got="a pickle",
            fix=f"move {self._directory} away; finished stages are found in the store",
        )


def open_cache(folder: str) -> Cache:
    """Opens the cache in a folder; nothing in it is unpickled."""
    return Cache(folder, disk=PlainDisk)


def drop_dangling(store: Store) -> int:
    """Drops cached results whose folders are gone; returns their number.

    Safe during runs: entries that change meanwhile are checked again.
    """
    folder = store.cache / "flyte"
    if not (folder / "cache.db").is_file():
        return 0
    dropped = 0
    with open_cache(str(folder)) as cache:
        for key in list(cache):
            if all(path.is_dir() for path in _folders_of(cache.get(key))):
                continue
            with cache.transact():
                if not all(path.is_dir() for path in _folders_of(cache.get(key))):
                    dropped += cache.delete(key)
    return dropped


def folders(literals: LiteralMap) -> Iterator[Path]:
    """Yields the folders of artifacts in a task's results, also those in lists and unions."""
    for literal in _leaves(literals):
        if (record := _artifact_in(literal)) is not None:
            yield Path(record["directory"]["path"])


def move_into(store: Store, literals: LiteralMap) -> bool:
    """Replaces the paths of a moved store in a task's results with paths of this store.

    Names are derived from content and key, so artifacts with equal names are equal.
    """
    has_moved = False
    for literal in _leaves(literals):
        record = _artifact_in(literal)
        if record is None:
            continue
        recorded = Path(record["directory"]["path"])
        try:
            artifact = resolve_below(store.artifacts, recorded.name, source="Flyte's cache")
        except UnsafePathError:
            continue
        if (
            recorded != artifact
            and recorded.parent.name == store.artifacts.name
            and artifact.is_dir()
        ):
            record["directory"]["path"] = str(artifact)
            literal.scalar.binary.value = msgpack.dumps(record)
            has_moved = True
    return has_moved


def _artifact_in(literal: Literal) -> dict[str, Any] | None:
    binary = literal.scalar.binary.value
    record = msgpack.loads(binary, strict_map_key=False) if binary else None
    is_artifact = isinstance(record, dict) and isinstance(record.get("directory"), dict)
    return record if is_artifact else None


def has_lost_points(literals: LiteralMap) -> bool:
    """Returns whether a mapped task's list lacks a point that was allowed to fail."""
    lists = (each.collection for each in literals.literals.values() if each.HasField("collection"))
    return any(leaf.scalar.HasField("none_type") for points in lists for leaf in _leaves(points))


def _leaves(literals: LiteralMap | LiteralCollection) -> Iterator[Literal]:
    inner = literals.literals
    for outer in inner.values() if isinstance(literals, LiteralMap) else inner:
        literal = _without_unions(outer)
        kind = literal.WhichOneof("value")
        if kind in ("collection", "map"):
            yield from _leaves(getattr(literal, kind))
        else:
            yield literal


def _without_unions(literal: Literal) -> Literal:
    is_union = literal.scalar.HasField("union")
    return _without_unions(literal.scalar.union.value) if is_union else literal


def _folders_of(entry: Any) -> list[Path]:
    literals = LiteralMap()
    if isinstance(entry, bytes):
        literals.ParseFromString(entry)
    return list(folders(literals))
