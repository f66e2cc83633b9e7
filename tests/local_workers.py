"""Workers in this process instead of Ray's: real backends used by the real policy and engine."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.distributed.batched_data_dict import InProcess
from nemo_rl_core.distributed.named_sharding import NamedSharding


@dataclass(frozen=True)
class LocalCluster:
    """Some bundles without a GPU."""

    world_size: int
    use_gpus: bool = False

    @property
    def bundle_ct_per_node_list(self) -> list[int]:
        return [self.world_size]


class LocalSession:
    """A session whose worker groups run here, one rank after the other.

    Attributes:
        groups: Requested groups by name.
        reserved: Bundles reserved in addition to the cluster, in order.
    """

    def __init__(self, world_size: int = 1) -> None:
        self.cluster = LocalCluster(world_size)
        self.groups: dict[str, LocalWorkers] = {}
        self.reserved: tuple[DedicatedBundles, ...] = ()

    def reserve_dedicated(self, own: Sequence[DedicatedBundles]) -> None:
        self.reserved = tuple(own)

    def dedicated_cluster(self, own: DedicatedBundles) -> LocalCluster:
        assert own in self.reserved
        return LocalCluster(own.number, self.cluster.use_gpus)

    def workers(
        self, worker_class: type, *, name: str, sharding: NamedSharding, **_: Any
    ) -> "tuple[LocalWorkers, bool]":
        self.groups[name] = LocalWorkers(worker_class, sharding)
        return self.groups[name], True

    def discard(self, name: str) -> None:
        self.groups.pop(name, None)


class LocalWorkers:
    """The calls of `RayWorkerGroup`; arguments are copied as if they were sent."""

    def __init__(self, worker_class: type, sharding: NamedSharding) -> None:
        self.sharding, self.world_size = sharding, sharding.world_size
        self.backends = [worker_class() for _ in range(self.world_size)]

    def machines(self) -> list[str]:
        return [""] * self.world_size

    def run_single_worker(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        return self._call(rank, method, *args, **kwargs)

    def start_single_worker(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        return self._call(rank, method, *args, **kwargs)

    def finish(self, pending: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
        return list(pending)

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [self._call(rank, method, *args, **kwargs) for rank in range(self.world_size)]

    def run_all_workers_sharded_data(
        self, method: str, *, common_kwargs: Mapping[str, Any], batch: Sequence[Any], **_: Any
    ) -> list[Any]:
        return [
            self._call(rank, method, batch=copy.deepcopy(batch[rank]), **common_kwargs)
            for rank in range(self.world_size)
        ]

    def run_all_workers_on_parts(
        self,
        function: Callable[..., Any],
        shared_parts: Sequence[Sequence[Any]],
        *,
        axis: str,
        common_kwargs: Mapping[str, Any],
        num_remote: int = 0,
        **_: Any,
    ) -> list[Any]:
        sent = [copy.deepcopy(blocks) for blocks in shared_parts]
        parts = [part for blocks in sent for part in blocks]
        answers = []
        for part, ranks in zip(parts, self.sharding.along(axis), strict=True):
            answer, *_ = [function(self.backends[rank], part, **common_kwargs) for rank in ranks]
            remote = [InProcess(each) for each in answer[1:]] if num_remote else []
            assert len(remote) == num_remote
            answers.append([answer[0], *remote] if num_remote else answer)
        return answers

    def _call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        backend = self.backends[rank]
        if method == "__ray_call__":
            function, *args = [kwargs.pop("fn"), *args] if "fn" in kwargs else args
            return function(backend, *args, **kwargs)
        return getattr(backend, method)(*args, **kwargs)
