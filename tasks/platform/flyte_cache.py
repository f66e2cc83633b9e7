"""flytekit's local cache, as far as the store's keeping needs it.

Read with protobuf alone: importing flytekit takes longer than cleaning up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from diskcache import Cache
from flyteidl.core.literals_pb2 import Literal, LiteralCollection, LiteralMap

from nemo_rl_core.store.store import Store


def drop_dangling(store: Store) -> int:
    """Drops cached results whose folders are gone: a hit on one would run the stage anyway.

    Safe beside runs: an entry that is written again meanwhile is looked at again.

    Returns:
        How many.
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
    """Folders of the artifacts among a task's results, those in lists and options included."""
    for literal in _leaves(literals):
        binary = literal.scalar.binary.value
        record = msgpack.loads(binary) if binary else None
        if isinstance(record, dict) and isinstance(record.get("directory"), dict):
            yield Path(record["directory"]["path"])


def has_lost_points(literals: LiteralMap) -> bool:
    """Whether a mapped task's list has a hole, where a point failed that was allowed to."""
    lists = (each.collection for each in literals.literals.values() if each.HasField("collection"))
    return any(leaf.scalar.HasField("none_type") for points in lists for leaf in _leaves(points))


def _leaves(literals: LiteralMap | LiteralCollection) -> Iterator[Literal]:
    """Every literal that holds no other one."""
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
