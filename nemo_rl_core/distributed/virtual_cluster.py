"""A part of a Ray cluster: resource bundles that several worker groups share."""

import os
import random
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl_core.config.placement import (
    DedicatedBundles,
    dedicated_bundles_per_node,
    with_dedicated_bundles,
)
from nemo_rl_core.distributed.ports import LOOPBACK, hold_port
from nemo_rl_core.distributed.private_ray import private_start
from nemo_rl_core.distributed.process_group import network_environment
from nemo_rl_core.distributed.resources import Resource, ResourceManager
from nemo_rl_core.errors import ResourceError
from nemo_rl_core.telemetry.waiting import waiting

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
_NUM_ATTEMPTS = 3
_SMALL_CPU_SHARE = 0.01
_PROBE_SECONDS = 10.0


def start_ray() -> None:
    """Starts Ray on this machine, or joins the cluster at `RAY_ADDRESS`; once per process.

    A local Ray listens on loopback only, with a new token (`private_start`), and serves every stage
    of a local run. Workers write to files, not to the terminal.
    """
    import ray

    if ray.is_initialized():
        return
    # Ray would otherwise warn on every start about what it may do with accelerators later.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    local: dict[str, Any] = {
        "address": "local",  # else Ray joins one that `ray start` has left on this machine
        "num_cpus": os.cpu_count(),
        "include_dashboard": False,
        "runtime_env": {
            "worker_process_setup_hook": _quiet_exit_hook(),
            "env_vars": network_environment(LOOPBACK),
        },
    }
    joins = bool(_ray_address())
    with (
        waiting("starting Ray"),
        _sigterm_handler_restored(),
        nullcontext() if joins else private_start() as folder,
    ):
        options = {} if joins else {**local, "_temp_dir": str(folder)}
        for attempts_left in reversed(range(_NUM_ATTEMPTS)):
            try:
                ray.init(ignore_reinit_error=True, log_to_driver=True, **options)
            except Exception as error:
                # Ray gives its own processes 30 s; a busy machine may take longer to start them.
                if "timed out during startup" not in str(error) or not attempts_left:
                    raise
            else:
                return


def resources_of_runs() -> ResourceManager:
    """Returns the resources of a run in this process: those of a Ray cluster or of this machine.

    The cluster is the one at `RAY_ADDRESS`, or to which this process is connected already.
    """
    address = _ray_address()
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if not address and not connected:
        return ResourceManager.of_this_machine()
    import ray

    try:
        if not connected:
            _probe(address)
            start_ray()
        resources = ray.cluster_resources()
    except (OSError, ray.exceptions.RayError, RuntimeError) as error:
        raise ResourceError(
            f"the Ray cluster at {address} cannot be joined",
            expected="a Ray head that listens there (RAY_ADDRESS); its token, if it has one, in "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="start it (`ray start --head`), or unset RAY_ADDRESS to run on this machine",
        ) from error
    return ResourceManager.of_ray(resources, name="the Ray cluster", is_this_machine=not address)


def _ray_address() -> str:
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def _probe(address: str) -> None:
    """Raises OSError if nothing listens at `host:port`: Ray itself tries for four minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()


@contextmanager
def _sigterm_handler_restored() -> Iterator[None]:
    """Restores a handler set by Python code, which Ray replaces by one that exits."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _quiet_exit_hook() -> Callable[[], None]:
    """Returns the setup hook of worker processes, which silences dropped SystemExits.

    Ray ends a worker with a SIGTERM that raises SystemExit in the running code. In a `__del__` or
    the callback of a weak reference, Python drops the exception and prints its traceback, which Ray
    forwards to the user's terminal. The hook is a nested function, so that Ray pickles its code:
    a worker can import this module only later.
    """

    def set_up() -> None:
        import sys

        report = sys.unraisablehook

        def report_errors(dropped: "sys.UnraisableHookArgs") -> None:
            if not issubclass(dropped.exc_type, SystemExit):
                report(dropped)

        sys.unraisablehook = report_errors

    return set_up


@dataclass(frozen=True)
class Bundle:
    """Resources of one worker of each group.

    Attributes:
        local_rank: Index of the bundle among the cluster's bundles on that machine.
    """

    group: "PlacementGroup"
    index: int
    node: str
    local_rank: int

    def strategy(self) -> "PlacementGroupSchedulingStrategy":
        """Returns the scheduling strategy that places a worker or task here."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.index
        )


class RayVirtualCluster:
    """Bundles of CPUs (and one GPU) each, reserved together when first needed.

    Args:
        bundle_ct_per_node_list: Number of bundles on each node: `[8, 8]` is two nodes of eight.
        use_gpus: Whether each bundle has a GPU.
        num_gpus_per_node: Number of GPUs of a node, and so the most bundles with a GPU on it.
        max_colocated_worker_groups: Number of groups that share the bundles equally.
        placement_group_strategy: Ray's strategy for placing the bundles of one node.
        name: Name in Ray's listings and in messages.
        num_cpus_per_bundle: CPUs of a bundle. Ray uses it only for bookkeeping, and a worker may
            compute on any core: with a fraction, a machine can run more ranks than it has cores.
        wait_seconds: How long to wait for the bundles before giving up.

    Raises:
        ResourceError: If the cluster does not have the bundles; without waiting if it never will.

    Example:
        >>> with RayVirtualCluster([8, 8]) as cluster:
        ...     cluster.world_size, cluster.node_count
        (16, 2)
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        num_gpus_per_node: int = 8,
        *,
        max_colocated_worker_groups: int = 1,
        placement_group_strategy: PlacementStrategy = "PACK",
        name: str = "",
        num_cpus_per_bundle: float = 1.0,
        wait_seconds: float = 60.0,
    ) -> None:
        if use_gpus and max(bundle_ct_per_node_list, default=0) > num_gpus_per_node:
            raise ResourceError(
                "a node has too few GPUs for its bundles",
                expected=f"at most {num_gpus_per_node} bundles per node (num_gpus_per_node)",
                got=str(bundle_ct_per_node_list),
                fix="spread the bundles over more nodes, or correct num_gpus_per_node",
            )
        self.bundle_ct_per_node_list = bundle_ct_per_node_list
        self.use_gpus = use_gpus
        self.num_gpus_per_node = num_gpus_per_node
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self._strategy = placement_group_strategy
        self.name = name
        self._resources: dict[Resource, float] = {"CPU": num_cpus_per_bundle}
        if use_gpus:
            self._resources["GPU"] = 1.0
        self._wait_seconds = wait_seconds
        self._bundles: list[Bundle] | None = None
        self._tenants: list[str] = []

    @property
    def world_size(self) -> int:
        """Number of bundles, which is also the number of ranks of a worker group."""
        return sum(self.bundle_ct_per_node_list)

    @property
    def node_count(self) -> int:
        """Number of nodes with at least one bundle."""
        return sum(1 for count in self.bundle_ct_per_node_list if count)

    def with_dedicated(
        self, bundles: DedicatedBundles, *, placed_before: Sequence[DedicatedBundles] = ()
    ) -> "RayVirtualCluster":
        """Returns a cluster of additional bundles that are dedicated to one worker group."""
        limit = self.num_gpus_per_node if self.use_gpus else None
        taken = [count for count in self.bundle_ct_per_node_list if count]
        taken = with_dedicated_bundles(taken, placed_before, num_gpus_per_node=limit)
        return RayVirtualCluster(
            dedicated_bundles_per_node(taken, bundles, num_gpus_per_node=limit),
            self.use_gpus,
            self.num_gpus_per_node,
            max_colocated_worker_groups=self.max_colocated_worker_groups,
            name=f"{self.name}-{bundles.name}" if self.name else "",
            # Without GPUs the first bundles may have reserved nearly all cores of the machine.
            num_cpus_per_bundle=self._resources["CPU"] if self.use_gpus else _SMALL_CPU_SHARE,
            wait_seconds=self._wait_seconds,
        )

    def admit(self, name: str) -> dict[Resource, float]:
        """Registers a worker group; returns its share of each bundle.

        Raises:
            ResourceError: If the maximum number of groups share the bundles already. Ray would wait
                silently, possibly forever, until one of them ends.
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
        # Ray counts in units of 1e-4: rounded down, so that all shares together fit.
        parts = self.max_colocated_worker_groups
        return {key: int(total / parts * 1e4) / 1e4 for key, total in self._resources.items()}

    def release(self, name: str) -> None:
        """Unregisters a worker group."""
        self._tenants.remove(name)

    def bundles(self) -> list[Bundle]:
        """Returns the bundles in rank order, with the bundles of a machine next to each other."""
        if self._bundles is None:
            self._bundles = _side_by_side(self._reserve())
        return self._bundles

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Returns an address for the rendezvous: the first bundle's machine and a free port there.

        Each call returns a different port, so that every worker group has a separate rendezvous.
        """
        import ray

        first = self.bundles()[0]
        if first.node == ray.get_runtime_context().get_node_id():
            return free_address()
        # Requests no CPU: worker groups may use the full bundle.
        ask = ray.remote(num_cpus=0)(free_address)
        answer: tuple[str, int] = ray.get(
            ask.options(scheduling_strategy=first.strategy()).remote()
        )
        return answer

    def _reserve(self) -> "list[PlacementGroup]":
        """Requests one placement group per node; again if Ray does not schedule one in time."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        start_ray()
        request = {key: count * self.world_size for key, count in self._resources.items()}
        resources = ResourceManager.of_ray(
            ray.cluster_resources(), name="the cluster", is_this_machine=not _ray_address()
        )
        resources.check(
            request,
            fix="choose a smaller cluster.shape, such as {shape: laptop}; in Python, fewer bundles "
            "or RayVirtualCluster(..., use_gpus=False)",
        )
        for _ in range(_NUM_ATTEMPTS):
            groups = [
                placement_group([dict(self._resources)] * count, self._strategy, name=self._label())
                for count in self.bundle_ct_per_node_list
                if count
            ]
            deadline = time.monotonic() + self._wait_seconds / _NUM_ATTEMPTS
            # `wait` asks Ray's controller; `ready` would start a process in every group for it.
            if all(group.wait(max(1, round(deadline - time.monotonic()))) for group in groups):
                return groups
            # A new request makes Ray plan again: a node may have left while the old one waited.
            for group in groups:
                remove_placement_group(group)
        raise self._not_freed(request, ray.available_resources())

    def _label(self) -> str:
        """A unique name for Ray's listings: Ray refuses a second group of the same name."""
        return f"{self.name}-{uuid.uuid4().hex[:8]}" if self.name else ""

    def _not_freed(
        self, request: Mapping[Resource, float], available: Mapping[str, float]
    ) -> ResourceError:
        missing = ResourceManager.of_ray(available, name="the cluster").missing(request)
        # If nothing is short, the resources are on the wrong nodes.
        short = ", ".join(f"{has:g} of {request[key]:g} {key}" for key, has in missing.items())
        return ResourceError(
            f"the cluster did not free {self.world_size} bundles of {self._resources} "
            f"within {self._wait_seconds:.0f} s",
            expected=f"bundles per node: {self.bundle_ct_per_node_list}, {self._strategy}",
            got=f"available now: {short or 'enough in total, but on other nodes'}",
            fix="stop what else runs on this Ray cluster, or choose a smaller cluster.shape",
        )

    def shutdown(self) -> None:
        """Releases the bundles; does nothing if there are none."""
        if self._bundles is None:
            return
        from ray.util.placement_group import remove_placement_group

        for group in {bundle.group.id: bundle.group for bundle in self._bundles}.values():
            remove_placement_group(group)
        self._bundles = None

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _side_by_side(groups: "list[PlacementGroup]") -> list[Bundle]:
    """Orders bundles by machine, machines in order of appearance.

    Ray may schedule the bundles of a group on machines in any order; neighboring ranks communicate
    most, so they should share a machine.
    """
    from ray.util.placement_group import placement_group_table

    by_node: dict[str, list[Bundle]] = {}
    for group in groups:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        for index in range(group.bundle_count):
            others = by_node.setdefault(nodes[index], [])
            others.append(Bundle(group, index, nodes[index], local_rank=len(others)))
    return [bundle for bundles in by_node.values() for bundle in bundles]


def free_address() -> tuple[str, int]:
    """Returns this machine's address as Ray knows it, and a free port.

    The port is reserved (`hold_port`). It is below the kernel's ephemeral ports and above the ports
    of Ray's workers.
    """
    import ray

    address = ray.util.get_node_ip_address()
    port = hold_port(random.SystemRandom().sample(range(20_000, 32_000), k=64), host=address)
    if port is not None:
        return address, port
    raise ResourceError(
        "no port between 20000 and 32000 is free", fix="stop the programs that listen there"
    )
