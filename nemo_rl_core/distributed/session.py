"""The cluster of this process, with workers that outlive a stage.

Starting a worker means importing torch or starting an engine: tens of seconds. Stages of one local
run therefore share workers: a stage asks for them by name and gets running ones where the last
stage left such. What a worker holds never carries over: every stage sets it up anew.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.distributed.allocator import allocator_environment
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.process_group import RECORDS, TIMEOUT, records_prefix
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting

_MAX_COLOCATED_WORKER_GROUPS = 8
_CPUS_BESIDE = 0.1
"""Of a laptop's cores, as Ray counts them: for up to ten bundles beside the trainer's."""
_sessions: "dict[ClusterConfig, ClusterSession]" = {}

_RECORDED_COLLECTIVES = 2000
_WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60)}


def thread_environment(num_threads: int | None) -> dict[str, str]:
    """The environment in which workers compute with so many threads.

    A thread that waits for the others sleeps. By default it spins for milliseconds, which takes the
    core from whatever else runs, such as another worker, and from the very thread that it waits
    for. What the user's environment says of it stays.

    Args:
        num_threads: Of each worker; None leaves that to Ray.

    Example:
        >>> thread_environment(2)["OMP_NUM_THREADS"]
        '2'
    """
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    is_set = any(name in os.environ for name in _WAIT_SETTINGS)
    return threads if is_set else {**threads, "OMP_WAIT_POLICY": "passive"}


def memory_environment(cluster: RayVirtualCluster) -> dict[str, str]:
    """The environment in which a trainer's worker uses again the memory that it has freed.

    On CPUs a step frees and allocates the same hundreds of MiB again. glibc would give them back,
    and the system would clear every page of them anew: a sixth of a small model's step. On GPUs see
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
    """The environment of ranks that wait for one another.

    On GPUs NCCL keeps a record of its last collectives, which each rank writes when one of them
    times out. What the user's environment says of the recorder stays.

    Args:
        name: Of the group of workers, whose records are called after it: ranks of other groups have
            the same numbers.
        use_gpus: Whether ranks compute on GPUs.
        timeout_seconds: After which a collective is given up; None leaves the default.
        folder: For the records.
    """
    found = {} if timeout_seconds is None else {TIMEOUT: f"{timeout_seconds:g}"}
    if not use_gpus or folder is None:
        return found
    records = {
        "TORCH_FR_BUFFER_SIZE": str(_RECORDED_COLLECTIVES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        RECORDS: records_prefix(folder, name),
    }
    return found | {name: value for name, value in records.items() if name not in os.environ}


class ClusterSession:
    """A cluster and the worker groups that run on it.

    Args:
        cluster: Where they run. One that is not its default needs room for as many groups as run
            side by side (`max_colocated_worker_groups`).
        num_threads: Cores that each worker computes with; None leaves that to Ray.
        collective_timeout_seconds: After which ranks that wait for another one give up.
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
        self._beside: dict[str, tuple[OwnBundles, RayVirtualCluster]] = {}

    @classmethod
    def of(cls, config: ClusterConfig) -> "ClusterSession":
        """A session of its own on a cluster of that shape."""
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
        """Running workers of that name and key, or new ones.

        Args:
            worker_class: What to start where there are none.
            name: One group of a name runs at a time.
            key: What the running group must have been started with; another key replaces it.
            sharding: The ranks, from the cluster's first bundle on; by default one worker.
            env_vars: Environment for new workers.
            cluster: Whose bundles they get, of `beside`; None for those of the session.

        Returns:
            The group, and whether it was started just now.
        """
        sharding = sharding or NamedSharding([0], ["data_parallel"])
        cluster = cluster or self.cluster
        key = f"{key} {sharding!r} {id(cluster)}"
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
                env_vars={**self._threads, **gang, **(env_vars or {})},
            )
        self._groups[name] = (key, group)
        return group, True

    def beside(self, own: OwnBundles) -> RayVirtualCluster:
        """Bundles of one group of workers' own, those that it has already where they are as many.

        Args:
            own: How many, and for whom. Others of this name are given back first.
        """
        if own.name in self._beside and self._beside[own.name][0] != own:
            self._give_back_beside([own.name])
        if own.name not in self._beside:
            before = [placed for placed, _ in self._beside.values()]
            self._beside[own.name] = own, self.cluster.beside(own, placed_before=before)
        return self._beside[own.name][1]

    def reserve_beside(self, own: Sequence[OwnBundles]) -> None:
        """Reserves all that a stage has beside the bundles of the session, in this order.

        So all lie on machines as planned, whichever group of workers starts first. What earlier
        stages have had besides is given back, unless all of this is among it.

        Args:
            own: For each group of workers.
        """
        found = {name: placed for name, (placed, _) in self._beside.items()}
        if all(found.get(each.name) == each for each in own):
            return
        self._give_back_beside([name for name, placed in found.items() if placed not in own])
        if self.cluster.use_gpus:
            self.cluster.bundles()  # the trainer's come first
        for each in own:
            self.beside(each).bundles()

    def _give_back_beside(self, names: Sequence[str]) -> None:
        for given_back in names:
            _, cluster = self._beside.pop(given_back)
            for name in [name for name, (_, group) in self._groups.items() if group.is_on(cluster)]:
                self.discard(name)
            cluster.shutdown()

    def discard(self, name: str) -> None:
        """Ends the group of that name, if it runs: after a failure nothing of it is reused."""
        if name in self._groups:
            self._groups.pop(name)[1].shutdown()

    def shutdown(self) -> None:
        """Ends all workers and gives the bundles back."""
        for name in list(self._groups):
            self.discard(name)
        self._give_back_beside(list(self._beside))
        self.cluster.shutdown()


def connect(config: ClusterConfig) -> ClusterSession:
    """The session of this process for that shape, started when first asked for."""
    if config not in _sessions:
        _sessions[config] = ClusterSession.of(config)
    return _sessions[config]


def shutdown() -> None:
    """Ends every session and Ray; a no-op where nothing runs."""
    if not _sessions and "ray" not in sys.modules:
        return  # importing it takes seconds, and it does not run
    import ray

    for session in _sessions.values():
        with suppress(ray.exceptions.RayError):
            session.shutdown()
    _sessions.clear()
    if ray.is_initialized():
        ray.shutdown()
