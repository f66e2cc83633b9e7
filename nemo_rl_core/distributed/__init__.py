"""Clusters, worker groups, batches, and weight transfer from trainer to engine.

The names below are imported on first use, for the same reasons as in `nemo_rl_core`.
"""

from typing import Any

_PUBLIC = {
    "BatchedDataDict": ".batched_data_dict",
    "NamedSharding": ".named_sharding",
    "RayVirtualCluster": ".virtual_cluster",
    "RayWorkerGroup": ".worker_group",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
