"""A share of a Ray cluster: bundles of resources that several worker groups live on."""

import os
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl_core.errors import ResourceError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def start_ray() -> None:
    """Starts Ray on this machine, or joins what `RAY_ADDRESS` names; once a process.

    One runtime serves every stage of a local run. Workers write to files, not to the terminal.
    """
    import ray

    if ray.is_initialized():
        return
    # Ray would otherwise warn on every start about what it may do with accelerators later.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    local: dict[str, Any] = {"num_cpus": os.cpu_count(), "include_dashboard": False}
    ray.init(
        ignore_reinit_error=True,
        log_to_driver=True,
        **({} if os.environ.get("RAY_ADDRESS") else local),
    )


class RayVirtualCluster:
    """Bundles of one CPU (and one GPU) each, reserved together when first needed.

    Args:
        bundle_ct_per_node_list: Bundles on each node: `[8, 8]` is two nodes of eight.
        use_gpus: Whether each bundle holds a GPU.
        max_colocated_worker_groups: How many groups share the bundles; each gets that fraction.
        placement_group_strategy: Ray's strategy for spreading the bundles.
        name: Shown in Ray's own listings.
        wait_seconds: How long to wait for the bundles before giving up.

    Raises:
        ResourceError: If the cluster does not have the bundles; said at once where it never will.

    Example:
        >>> with RayVirtualCluster([1], use_gpus=False) as cluster:
        ...     cluster.world_size
        1
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        *,
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        placement_group_strategy: PlacementStrategy = "PACK",
        name: str = "",
        wait_seconds: float = 60.0,
    ) -> None:
        self.bundle_ct_per_node_list = bundle_ct_per_node_list
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self._strategy = placement_group_strategy
        self._name = name
        self._wait_seconds = wait_seconds
        self._placement_groups: list[PlacementGroup] | None = None
        self._tenants: list[str] = []

    @property
    def world_size(self) -> int:
        """How many bundles, and so how many ranks a worker group has."""
        return sum(self.bundle_ct_per_node_list)

    @property
    def node_count(self) -> int:
        """How many nodes hold at least one bundle."""
        return sum(1 for count in self.bundle_ct_per_node_list if count)

    def admit(self, name: str) -> float:
        """Counts a worker group in; returns its share of each bundle.

        Raises:
            ResourceError: If as many groups as may share the bundles do so already. Ray would wait
                for one of them to end, for ever and without a word.
        """
        if len(self._tenants) >= self.max_colocated_worker_groups:
            raise ResourceError(
                f"no bundle of the cluster has room for the worker group {name!r}",
                expected=f"at most {self.max_colocated_worker_groups} groups at once "
                "(max_colocated_worker_groups)",
                got=", ".join(self._tenants),
                fix="shut one of them down, or let more groups share the bundles",
            )
        self._tenants.append(name)
        return 1.0 / self.max_colocated_worker_groups

    def release(self, name: str) -> None:
        """Counts a worker group out."""
        self._tenants.remove(name)

    def placement_groups(self) -> "list[PlacementGroup]":
        """The reserved bundles, one placement group a node."""
        if self._placement_groups is None:
            self._placement_groups = self._reserve()
        return self._placement_groups

    def _reserve(self) -> "list[PlacementGroup]":
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util.placement_group import placement_group, remove_placement_group

        start_ray()
        self._refuse_the_impossible(ray.cluster_resources())
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpus else {})}
        groups = [
            placement_group([dict(bundle) for _ in range(count)], self._strategy, name=self._name)
            for count in self.bundle_ct_per_node_list
            if count
        ]
        try:
            ray.get([group.ready() for group in groups], timeout=self._wait_seconds)
        except GetTimeoutError as error:
            for group in groups:
                remove_placement_group(group)
            raise ResourceError(
                f"the cluster did not free {self.world_size} bundles of {bundle} "
                f"within {self._wait_seconds:.0f} s",
                got=f"available now: {_readable(ray.available_resources())}",
                fix="stop what else runs on this Ray cluster, or choose a smaller cluster.shape",
            ) from error
        return groups

    def _refuse_the_impossible(self, resources: dict[str, float]) -> None:
        needed = {"CPU": self.world_size, **({"GPU": self.world_size} if self.use_gpus else {})}
        for resource, count in needed.items():
            if resources.get(resource, 0) < count:
                raise ResourceError(
                    f"the cluster has too few of {resource}",
                    expected=f"{count} {resource}",
                    got=_readable(resources),
                    fix="choose a smaller cluster.shape, such as {shape: laptop}",
                )

    def shutdown(self) -> None:
        """Gives the bundles back; may be called again."""
        from ray.util.placement_group import remove_placement_group

        for group in self._placement_groups or ():
            remove_placement_group(group)
        self._placement_groups = None

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _readable(resources: dict[str, float]) -> str:
    shown = {key: value for key, value in resources.items() if key in {"CPU", "GPU"}}
    return ", ".join(f"{value:g} {key}" for key, value in sorted(shown.items())) or "nothing"
