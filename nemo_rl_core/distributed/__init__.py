"""Clusters, worker groups, batches, and the way of the weights from trainer to engine.

The names below are imported when first asked for, as those of `nemo_rl_core` are, and for the same
reasons.
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
