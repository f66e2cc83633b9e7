"""One plain class, spawned once a bundle, and driven by method name."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import NemoRLError, WorkerError


class RayWorkerGroup:
    """Ray actors of one class, rank by rank over a cluster's bundles.

    The class stays plain: `ray.remote` is applied here, so that a test can build it directly.

    Args:
        cluster: Where the workers live.
        worker_class: A class whose constructor takes no arguments.
        name: The word for these workers in messages.
        env_vars: Environment of the worker processes, set before they import anything.

    Raises:
        ResourceError: When too many groups share the cluster already.
        WorkerError: When a method raises in a worker, or a worker dies; names rank and cause.
            A `NemoRLError` from a worker is raised as it is.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        worker_class: type,
        *,
        name: str,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.name = name
        groups = cluster.placement_groups()
        share = cluster.admit(name)
        self._cluster = cluster
        remote_class = ray.remote(worker_class)
        self._workers: list[Any] = [
            remote_class.options(
                num_cpus=share,
                num_gpus=share if cluster.use_gpus else 0,
                runtime_env={"env_vars": dict(env_vars or {})},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for group in groups
            for bundle in range(group.bundle_count)
        ]

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    def run_single_worker(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        """Calls one worker and waits for its answer."""
        return self._results([getattr(self._workers[rank], method).remote(*args, **kwargs)])[0]

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls every worker with the same arguments; answers in rank order."""
        return self._results([getattr(w, method).remote(*args, **kwargs) for w in self._workers])

    def start_single_worker(
        self, method: str, *args: Any, num_returns: int = 1, rank: int = 0
    ) -> list[Any]:
        """Calls one worker without waiting.

        Returns:
            One reference for each value returned; another group's method takes them as arguments,
            so that large values never pass through this process.
        """
        call = getattr(self._workers[rank], method).options(num_returns=num_returns)
        references = call.remote(*args)
        return references if num_returns > 1 else [references]

    def finish(self, pending: Sequence[Any]) -> list[Any]:
        """Waits for the values that references stand for."""
        return self._results(pending)

    def _results(self, pending: Sequence[Any]) -> list[Any]:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        results = []
        for rank, reference in enumerate(pending):
            try:
                results.append(ray.get(reference))
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, NemoRLError):
                    raise type(cause)(*cause.args) from error
                raise WorkerError(
                    f"worker {rank} of {self.name!r} raised {type(cause).__name__}: {cause}"[:500],
                    fix="the worker's trace is in the log",
                ) from error
            except RayActorError as error:
                raise WorkerError(
                    f"worker {rank} of {self.name!r} died",
                    got=str(error).splitlines()[0],
                    fix="often memory: lower max_tokens_per_microbatch or generation.kv_cache_gib; "
                    "then run the same command again, it resumes from the last save",
                ) from error
        return results

    def shutdown(self) -> None:
        """Ends the workers; may be called again."""
        import ray

        for worker in self._workers:
            ray.kill(worker)
        if self._workers:
            self._cluster.release(self.name)
        self._workers = []
