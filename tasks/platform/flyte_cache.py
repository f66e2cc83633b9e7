"""Maintenance of flytekit's local cache.

Read with protobuf only: importing flytekit takes longer than the clean-up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from diskcache import Cache
from flyteidl.core.literals_pb2 import Literal, LiteralCollection, LiteralMap

from nemo_rl_core.store.store import Store


def drop_dangling(store: Store) -> int:
    """Drops cached results whose folders are gone; a hit on one would run the stage anyway.

    Safe during runs: entries that change meanwhile are checked again.

    Returns:
        The number of dropped entries.
    """
    folder = store.cache / "flyte"
    if not (folder / "cache.db").is_file():
        return 0
    dropped = 0
    with Cache(str(folder)) as cache:
        for key in list(cache):
            if all(path.is_dir() for path in _folders_of(cache.get(key))):
                continue
            with cache.transact():
                if not all(path.is_dir() for path in _folders_of(cache.get(key))):
                    dropped += cache.delete(key)
    return dropped


def folders(literals: LiteralMap) -> Iterator[Path]:
    """Yields the folders of artifacts in a task's results, including those in lists and options."""
    for literal in _leaves(literals):
        binary = literal.scalar.binary.value
        record = msgpack.loads(binary) if binary else None
        if isinstance(record, dict) and isinstance(record.get("directory"), dict):
            yield Path(record["directory"]["path"])


def has_lost_points(literals: LiteralMap) -> bool:
    """Returns whether a mapped task's list lacks a point that was allowed to fail."""
    lists = (each.collection for each in literals.literals.values() if each.HasField("collection"))
    return any(leaf.scalar.HasField("none_type") for points in lists for leaf in _leaves(points))


def _leaves(literals: LiteralMap | LiteralCollection) -> Iterator[Literal]:
    """Yields the literals without children."""
    inner = literals.literals
    for literal in inner.values() if isinstance(literals, LiteralMap) else inner:
        kind = literal.WhichOneof("value")
        if kind in ("collection", "map"):
            yield from _leaves(getattr(literal, kind))
        elif literal.scalar.HasField("union"):
            yield from _leaves(LiteralCollection(literals=[literal.scalar.union.value]))
        else:
            yield literal


def _folders_of(entry: Any) -> list[Path]:
    literals = LiteralMap()
    if isinstance(entry, bytes):
        literals.ParseFromString(entry)
    return list(folders(literals))
