"""Where flytekit keeps things when it runs on this machine: in the store, nowhere else.

flytekit would put outputs into a temporary folder of each process, so that a cache hit fails after
a clean-up, and its cache beside the store. Both are moved; on a cluster nothing is touched.
"""

import os
from typing import Any

from flytekit.configuration import DataConfig
from flytekit.core import data_persistence, local_cache
from flytekit.core.context_manager import FlyteContextManager

from nemo_rl_core.infra.store import Store
from tasks.flyte_cache import folders, has_lost_points


def on_cluster() -> bool:
    """Whether this process is a container that Flyte started."""
    return "FLYTE_INTERNAL_EXECUTION_ID" in os.environ


def use_store() -> None:
    """Points flytekit's local files and its local cache at the store of `NEMO_RL_HOME`."""
    if on_cluster():
        return
    cache = Store.default().cache
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # importing must not fail; a run checks the store first, and says what is wrong
    provider = data_persistence.default_local_file_access_provider
    # Initialized anew rather than replaced: contexts that exist already hold this very object.
    provider.__init__(
        local_sandbox_dir=str(cache / "sandbox"),
        raw_output_prefix=str(cache / "raw"),
        data_config=DataConfig.auto(),
    )
    # `pyflyte register` imports this within a context of its own, which must stay where it is.
    if FlyteContextManager.size() == 1:
        FlyteContextManager.initialize()
    local_cache.CACHE_LOCATION = str(cache / "flyte")
    local_cache.LocalTaskCache._initialized = False
    local_cache.LocalTaskCache.get = staticmethod(_get_if_whole)


_flytekit_get = local_cache.LocalTaskCache.get


def _get_if_whole(*args: Any) -> Any:
    """A cached result whose folders are all still there; else the stage runs again.

    So does a mapped task that lost points: on a cluster each point is cached by itself, here the
    list as a whole. Points that ended well are found in the store then.
    """
    literals = _flytekit_get(*args)
    if literals is None:
        return None
    found, store = literals.to_flyte_idl(), Store.default()
    is_whole = all(store.hold(folder) for folder in folders(found))
    return literals if is_whole and not has_lost_points(found) else None
