"""Redirects flytekit's local files and cache into the store.

flytekit puts outputs into a temporary folder per process, so that cache hits fail after a clean-up,
and its cache outside the store. Both are moved, except on a cluster.
"""

import functools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit.configuration import DataConfig
from flytekit.core import data_persistence, local_cache
from flytekit.core.context_manager import FlyteContextManager
from flytekit.models.literals import LiteralMap

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.store import Store, damage_of_changed_files
from tasks.flyte.flyte_cache import folders, has_lost_points, move_into, open_cache


def on_cluster() -> bool:
    """Returns whether this process runs in a container of Flyte."""
    return "FLYTE_INTERNAL_EXECUTION_ID" in os.environ


def use_store() -> None:
    """Points flytekit's local files and its local cache at the store of `NEMO_RL_HOME`."""
    if on_cluster():
        return
    store = Store.default()
    cache = store.cache
    try:
        store.create()
        cache.mkdir(exist_ok=True)
    except OSError:
        return  # importing must not fail; a run checks the store first and reports errors
    provider = data_persistence.default_local_file_access_provider
    # Initialized again, not replaced: existing contexts refer to this object.
    provider.__init__(
        local_sandbox_dir=str(cache / "sandbox"),
        raw_output_prefix=str(cache / "raw"),
        data_config=DataConfig.auto(),
    )
    # `pyflyte register` imports this module in its own context, which must not be replaced.
    if FlyteContextManager.size() == 1:
        FlyteContextManager.initialize()
    local_cache.CACHE_LOCATION = str(cache / "flyte")
    local_cache.LocalTaskCache._initialized = False
    local_cache.LocalTaskCache.initialize = staticmethod(_open_cache)
    local_cache.LocalTaskCache.get = staticmethod(_get_if_intact)
    local_cache.LocalTaskCache.set = staticmethod(_set)


def _open_cache() -> None:
    local_cache.LocalTaskCache._cache = open_cache(local_cache.CACHE_LOCATION)
    local_cache.LocalTaskCache._initialized = True


def _names_a_damaged_cache(call: Callable[..., Any]) -> Callable[..., Any]:
    """Converts SQLite's errors about a damaged cache into an error that names the file."""

    @functools.wraps(call)
    def named(*args: Any) -> Any:
        try:
            return call(*args)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # other bits have details
            if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            folder = local_cache.CACHE_LOCATION
            raise StoreError(
                f"the stage cache {folder}/cache.db is damaged",
                expected="an intact SQLite file",
                got=str(error),
                fix=f"end all runs and move {folder} away; finished stages are found in the store",
            ) from error

    return named


_flytekit_get = local_cache.LocalTaskCache.get
_set = _names_a_damaged_cache(local_cache.LocalTaskCache.set)


@_names_a_damaged_cache
def _get_if_intact(*args: Any) -> Any:
    """Returns a cached result if all its folders exist undamaged; else the stage runs again.

    The stage also runs again if its user code has read something that differs now. In a store that
    was copied or moved, its own folders are returned instead of those of the original. A folder of
    another store is a miss. So is a mapped task with lost points: locally only the complete list is
    cached. Completed points are then found in the store.
    """
    literals = _flytekit_get(*args)
    if literals is None:
        return None
    results, store = literals.to_flyte_idl(), Store.default()
    if move_into(store, results):
        literals = LiteralMap.from_flyte_idl(results)
    is_whole = all(_is_intact(store, folder) for folder in folders(results))
    return literals if is_whole and not has_lost_points(results) else None


def _is_intact(store: Store, folder: Path) -> bool:
    is_in_store = folder.parent == store.artifacts
    if not is_in_store or not store.hold(folder) or not store.is_current(folder):
        return False
    return not damage_of_changed_files(store, folder)
