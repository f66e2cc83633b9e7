"""flytekit's local cache, as far as the store's keeping needs it.

Read with protobuf alone: importing flytekit takes longer than cleaning up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from diskcache import Cache
from flyteidl.core.literals_pb2 import LiteralMap

from nemo_rl_core.infra.store import Store


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


def folders(literals: Any) -> Iterator[Path]:
    """Folders of the artifacts among a task's results."""
    for literal in literals.literals.values():
        binary = literal.scalar.binary if literal.scalar else None
        record = msgpack.loads(binary.value) if binary and binary.value else None
        if isinstance(record, dict) and isinstance(record.get("directory"), dict):
            yield Path(record["directory"]["path"])


def _folders_of(entry: Any) -> list[Path]:
    literals = LiteralMap()
    if isinstance(entry, bytes):
        literals.ParseFromString(entry)
    return list(folders(literals))
