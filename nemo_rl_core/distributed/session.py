"""The cluster of this process, with workers that outlive a stage.

Starting a worker means importing torch or starting an engine: tens of seconds. Stages of one local
run therefore share workers: a stage requests them by name and gets running ones if the last stage
left any. The state of a worker is never reused: every stage sets it up again.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nemo_rl_core.checkpoints.model_code import worker_environment
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.distributed.allocator import allocator_environment
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.process_group import RECORDS, TIMEOUT, records_prefix
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting

_MAX_COLOCATED_WORKER_GROUPS = 8
_CPUS_BESIDE = 0.1
"""CPUs of a laptop, as Ray counts them, for up to ten dedicated bundles."""
_sessions: "dict[ClusterConfig, ClusterSession]" = {}

_RECORDED_COLLECTIVES = 2000
_WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60)}


def thread_environment(num_threads: int | None) -> dict[str, str]:
    """Returns the environment of workers that compute with a number of threads.

    Threads that wait for others sleep. By default they spin for milliseconds, and take the core
    from other workers and even from the threads that they wait for. Variables that are set in the
    environment are not changed.

    Args:
        num_threads: Number of threads of each worker; None leaves that to Ray.

    Example:
        >>> thread_environment(2)["OMP_NUM_THREADS"]
        '2'
    """
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    is_set = any(name in os.environ for name in _WAIT_SETTINGS)
    return threads if is_set else {**threads, "OMP_WAIT_POLICY": "passive"}


def memory_environment(cluster: RayVirtualCluster) -> dict[str, str]:
    """Returns the environment in which a trainer's worker reuses memory that it has freed.

    On CPUs every step frees and allocates the same hundreds of MiB. glibc would return them to the
    system, which would clear every page again: a sixth of a small model's step. On GPUs see
    `allocator_environment`.
    """
    if cluster.use_gpus:
        return allocator_environment()
    is_set = any(name in os.environ for name in _KEEP_FREED_MEMORY)
    return {} if is_set else _KEEP_FREED_MEMORY


def gang_environment(
    *,
    name: str,
    use_gpus: bool,
    timeout_seconds: float | None = None,
    folder: Path | None = None,
) -> dict[str, str]:
    """Returns the environment of ranks that wait for one another.

    On GPUs NCCL records its last collectives, which each rank writes when one of them times out.
    Variables of the recorder that are set in the environment are not changed.

    Args:
        name: Name of the group of workers, which is part of the names of its records, since ranks
            of other groups have the same numbers.
    """
    variables = {} if timeout_seconds is None else {TIMEOUT: f"{timeout_seconds:g}"}
    if not use_gpus or folder is None:
        return variables
    records = {
        "TORCH_FR_BUFFER_SIZE": str(_RECORDED_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        RECORDS: records_prefix(folder, name),
    }
    return variables | {name: value for name, value in records.items() if name not in os.environ}


class ClusterSession:
    """A cluster and the worker groups that run on it.

    Args:
        cluster: Cluster of the workers. A custom one must allow as many worker groups as run at
            the same time (`max_colocated_worker_groups`).
        collective_timeout_seconds: Timeout of ranks that wait for another one.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        *,
        num_threads: int | None = None,
        collective_timeout_seconds: float | None = None,
    ) -> None:
        self.cluster = cluster
        self._threads = thread_environment(num_threads)
        self._timeout_seconds = collective_timeout_seconds
        self._records = Store.default().work / "collectives"
        if cluster.use_gpus:
            self._records.mkdir(parents=True, exist_ok=True)
        self._groups: dict[str, tuple[str, RayWorkerGroup]] = {}
        self._dedicated: dict[str, tuple[DedicatedBundles, RayVirtualCluster]] = {}

    @classmethod
    def of(cls, config: ClusterConfig) -> "ClusterSession":
        """Creates a separate session on a cluster of that shape."""
        use_gpus = config.num_gpus > 0
        cores = os.cpu_count() or 1
        cluster = RayVirtualCluster(
            config.bundles_per_node,
            use_gpus,
            config.num_gpus_per_node,
            max_colocated_worker_groups=_MAX_COLOCATED_WORKER_GROUPS,
            name=config.shape,
            # Four ranks of a laptop with two cores take turns: slower, but the same program.
            num_cpus_per_bundle=1.0
            if use_gpus
            else min(1.0, (cores - _CPUS_BESIDE) / config.num_workers),
        )
        return cls(
            cluster,
            num_threads=config.num_threads,
            collective_timeout_seconds=config.collective_timeout_seconds,
        )

    def workers(
        self,
        worker_class: type,
        *,
        name: str,
        key: str,
        sharding: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        cluster: RayVirtualCluster | None = None,
    ) -> tuple[RayWorkerGroup, bool]:
        """Returns running workers of that name and key, or starts new ones.

        Args:
            key: Key of the group; a running group with another key is replaced.
            sharding: Sharding of the ranks, from the cluster's first bundle on; by default one
                worker.
            cluster: Dedicated cluster of the workers; None uses the session's.
        """
        sharding = sharding or NamedSharding([0], ["data_parallel"])
        cluster = cluster or self.cluster
        code = worker_environment()
        key = f"{key} {sharding!r} {id(cluster)} {code}"
        running = self._groups.get(name)
        if running and running[0] == key and not running[1].is_broken:
            return running[1], False
        self.discard(name)
        gang = gang_environment(
            name=name,
            use_gpus=self.cluster.use_gpus,
            timeout_seconds=self._timeout_seconds,
            folder=self._records,
        )
        with waiting(f"starting the workers of {name}"):
            group = RayWorkerGroup(
                cluster,
                worker_class,
                name=name,
                sharding=sharding,
                env_vars={**self._threads, **gang, **code, **(env_vars or {})},
            )
        self._groups[name] = (key, group)
        return group, True

    def dedicated_cluster(self, bundles: DedicatedBundles) -> RayVirtualCluster:
        """Returns the cluster of a group's dedicated bundles, the existing one if unchanged."""
        if bundles.name in self._dedicated and self._dedicated[bundles.name][0] != bundles:
            self._release_dedicated([bundles.name])
        if bundles.name not in self._dedicated:
            before = [placed for placed, _ in self._dedicated.values()]
            self._dedicated[bundles.name] = (
                bundles,
                self.cluster.with_dedicated(bundles, placed_before=before),
            )
        return self._dedicated[bundles.name][1]

    def reserve_dedicated(self, bundles: Sequence[DedicatedBundles]) -> None:
        """Reserves the bundles that a stage needs in addition to those of the session, in order.

        All bundles are then on the planned machines, whichever group of workers starts first.
        Dedicated bundles of earlier stages that this stage does not need are released, but only if
        it needs new ones.
        """
        running = {name: placed for name, (placed, _) in self._dedicated.items()}
        if all(running.get(each.name) == each for each in bundles):
            return
        self._release_dedicated([name for name, placed in running.items() if placed not in bundles])
        if self.cluster.use_gpus:
            self.cluster.bundles()  # the trainer's come first
        for each in bundles:
            self.dedicated_cluster(each).bundles()

    def _release_dedicated(self, names: Sequence[str]) -> None:
        for given_back in names:
            _, cluster = self._dedicated.pop(given_back)
            for name in [name for name, (_, group) in self._groups.items() if group.is_on(cluster)]:
                self.discard(name)
            cluster.shutdown()

    def discard(self, name: str) -> None:
        """Ends the group of that name, if it runs; its workers are not reused."""
        if name in self._groups:
            self._groups.pop(name)[1].shutdown()

    def shutdown(self) -> None:
        """Ends all workers and releases the bundles."""
        for name in list(self._groups):
            self.discard(name)
        self._release_dedicated(list(self._dedicated))
        self.cluster.shutdown()


def connect(config: ClusterConfig) -> ClusterSession:
    """Returns the session of this process for that shape, which the first call starts."""
    if config not in _sessions:
        _sessions[config] = ClusterSession.of(config)
    return _sessions[config]


def shutdown() -> None:
    """Ends every session and Ray; a no-op if nothing runs."""
    if not _sessions and "ray" not in sys.modules:
        return  # Ray does not run, and its import takes seconds
    import ray

    for session in _sessions.values():
        with suppress(ray.exceptions.RayError):
            session.shutdown()
    _sessions.clear()
    if ray.is_initialized():
        ray.shutdown()
