"""The cluster of this process, with workers that outlive a stage.

Starting a worker means importing torch or starting an engine: tens of seconds. Stages of one local
run therefore share workers: a stage asks for them by name and gets running ones where the last
stage left such. What a worker holds never carries over: every stage sets it up anew.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup

_MAX_COLOCATED_WORKER_GROUPS = 8
_sessions: "dict[ClusterConfig, ClusterSession]" = {}


class ClusterSession:
    """A cluster of one shape and the worker groups that run on it."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.cluster = RayVirtualCluster(
            [1],
            use_gpus=config.num_gpus > 0,
            max_colocated_worker_groups=_MAX_COLOCATED_WORKER_GROUPS,
            name=config.shape,
        )
        self._groups: dict[str, tuple[str, RayWorkerGroup]] = {}

    def workers(
        self,
        worker_class: type,
        *,
        name: str,
        key: str,
        env_vars: Mapping[str, str] | None = None,
    ) -> tuple[RayWorkerGroup, bool]:
        """Running workers of that name and key, or new ones.

        Args:
            worker_class: What to start where there are none.
            name: One group of a name runs at a time.
            key: What the running group must have been started with; another key replaces it.
            env_vars: Environment for new workers.

        Returns:
            The group, and whether it was started just now.
        """
        running = self._groups.get(name)
        if running and running[0] == key:
            return running[1], False
        if running:
            running[1].shutdown()
        threads = {"OMP_NUM_THREADS": str(self.config.num_threads)}
        group = RayWorkerGroup(
            self.cluster, worker_class, name=name, env_vars={**threads, **(env_vars or {})}
        )
        self._groups[name] = (key, group)
        return group, True

    def discard(self, name: str) -> None:
        """Ends the group of that name, if it runs: after a failure nothing of it is reused."""
        if name in self._groups:
            self._groups.pop(name)[1].shutdown()

    def shutdown(self) -> None:
        """Ends all workers and gives the bundles back."""
        for name in list(self._groups):
            self.discard(name)
        self.cluster.shutdown()


def connect(config: ClusterConfig) -> ClusterSession:
    """The session of this process for that shape, started when first asked for."""
    if config not in _sessions:
        _sessions[config] = ClusterSession(config)
    return _sessions[config]


def shutdown() -> None:
    """Ends every session and Ray; a no-op where nothing runs."""
    if not _sessions and "ray" not in sys.modules:
        return  # not imported only to hear that it does not run: that takes seconds
    import ray

    for session in _sessions.values():
        with suppress(ray.exceptions.RayError):
            session.shutdown()
    _sessions.clear()
    if ray.is_initialized():
        ray.shutdown()
