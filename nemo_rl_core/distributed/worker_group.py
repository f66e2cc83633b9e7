"""Actors of a plain class, one per bundle, which are called by method name."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_core.distributed.cpu_time import read_cpu_seconds
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.process_group import RECORDS, rank_environment
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import (
    NemoRLError,
    ResourceError,
    TransferError,
    WorkerError,
    WorkerLostError,
)
from nemo_rl_core.telemetry import usage

SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a worker that sees all GPUs of its machine and uses the one of `own_gpu`.

Ranks that read one another's memory, such as those of vLLM's custom all-reduce, need this.
"""


class RayWorkerGroup:
    """Ray actors of one class, rank by rank over a cluster's bundles.

    The class stays plain: `ray.remote` is applied here, so that a test can build it directly.
    Several workers have the variables of `join_process_group` in their environment; a single worker
    does not. Ray shows a worker only one GPU, as device 0, unless `SEES_ALL_GPUS` is in its
    environment.

    Args:
        cluster: Cluster of the workers.
        worker_class: A class whose constructor takes only `worker_kwargs`.
        name: Name of these workers in messages; by default the class's name.
        sharding: Named axes of the ranks; by default one axis, `data_parallel`.
        env_vars: Environment of the worker processes, set before they import anything.
        num_workers: Number of workers, from the first bundle on; by default one per bundle.
        worker_kwargs: Arguments of the constructor.

    Raises:
        ResourceError: If too many groups share the cluster already, or it has too few bundles.
        WorkerError: If a method raises in a worker, or a worker dies; has the rank, host and trace
            of the first failure. A `NemoRLError` from a worker is raised unchanged.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        worker_class: type,
        *,
        name: str | None = None,
        sharding: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        num_workers: int | None = None,
        worker_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        import ray

        self.name = name or worker_class.__name__
        self._class_name = worker_class.__name__
        count = num_workers or (sharding.world_size if sharding else cluster.world_size)
        self.sharding = sharding or NamedSharding(range(count), ["data_parallel"])
        if self.sharding.world_size != count or count > cluster.world_size:
            raise ResourceError(
                f"the worker group {self.name!r} does not fit its cluster",
                expected=f"{self.sharding!r} over at most {cluster.world_size} bundles",
                got=f"{count} workers",
                fix="make the cluster larger, or leave num_workers to the sharding",
            )
        bundles = cluster.bundles()[:count]
        self._cluster = cluster
        self.is_broken = False
        self._records = (env_vars or {}).get(RECORDS)
        self._started = time.time()
        environments = self._environments(count, dict(env_vars or {}))
        share = cluster.admit(self.name)  # last: an error after it would not release the share
        remote_class = ray.remote(worker_class)
        self._workers: list[Any] = [
            remote_class.options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                runtime_env={"env_vars": environment},
                scheduling_strategy=bundle.strategy(),
            ).remote(**(worker_kwargs or {}))
            for bundle, environment in zip(bundles, environments, strict=True)
        ]
        usage.watch(self)

    def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        """Returns CPU seconds of each worker by its id; late workers keep their last value."""
        return read_cpu_seconds(self._workers, timeout_seconds)

    def _environments(self, count: int, common: dict[str, str]) -> list[dict[str, str]]:
        if count == 1:
            return [common]
        address, port = self._cluster.get_master_address_and_port()
        return [
            common
            | rank_environment(
                rank, count, address=address, port=port, local_rank=bundle.local_rank
            )
            for rank, bundle in enumerate(self._cluster.bundles()[:count])
        ]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def is_on(self, cluster: RayVirtualCluster) -> bool:
        """Whether the workers run on the bundles of that cluster."""
        return self._cluster is cluster

    def machines(self) -> list[str]:
        """Returns Ray's id of the machine of each worker, in rank order."""
        return [bundle.node for bundle in self._cluster.bundles()[: self.world_size]]

    def run_single_worker(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        """Calls one worker and waits for its answer."""
        return self.finish([getattr(self._workers[rank], method).remote(*args, **kwargs)])[0]

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls every worker with the same arguments; returns answers in rank order."""
        return self.finish([getattr(w, method).remote(*args, **kwargs) for w in self._workers])

    def run_all_workers_sharded_data(
        self,
        method: str,
        *,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        common_kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls workers with the shards of their coordinates on the named axes.

        Args:
            method: Method of the workers.
            in_sharded_axes: Axes along which shards differ. Each of `kwargs` is a nested list: its
                first index is the coordinate on the first of these axes, and so on.
            replicate_on_axes: Axes along which workers get the same shard. On other axes only the
                workers at coordinate 0 are called.
            output_is_replicated: Axes along which workers return the same; only the answer at
                coordinate 0 is returned.
            common_kwargs: Arguments that every worker gets unsharded.
            timeout_seconds: Maximum time to wait for the answers; None waits forever.
            **kwargs: Arguments by shard.

        Returns:
            Answers in rank order: one per shard, if there is one sharded axis and input and output
            are replicated on the others.
        """
        import ray

        axes_in_use = {*in_sharded_axes, *replicate_on_axes}
        idle = [axis for axis in self.sharding.names if axis not in axes_in_use]
        shared: dict[tuple[int, ...], dict[str, Any]] = {}
        pending, answering = [], []
        for rank in self.sharding.ranks(**dict.fromkeys(idle, 0)):
            coordinates = self.sharding.coordinates(rank)
            shard = tuple(coordinates[axis] for axis in in_sharded_axes)
            if shard not in shared:  # stored once for all ranks that read it
                shared[shard] = {key: ray.put(_item(value, shard)) for key, value in kwargs.items()}
            call = getattr(self._workers[rank], method)
            pending.append(call.remote(**shared[shard], **(common_kwargs or {})))
            answering.append(all(coordinates[axis] == 0 for axis in output_is_replicated))
        answers = zip(self.finish(pending, timeout_seconds), answering, strict=True)
        return [answer for answer, is_first in answers if is_first]

    def run_all_workers_on_parts(
        self,
        function: Callable[..., Any],
        shared_parts: Sequence[Sequence[Any]],
        *,
        axis: str,
        common_kwargs: Mapping[str, Any],
        timeout_seconds: float | None = None,
        num_remote: int = 0,
    ) -> list[Any]:
        """Calls a function in each worker, with its part of a value that neighboring workers share.

        Shared values are stored once: a call has references to them, and the index of the worker's
        part.

        Args:
            shared_parts: Parts of consecutive workers along `axis`, grouped by the workers that
                share them.
            axis: Axis of the parts. Workers along other axes get the same part, and only the
                answer at coordinate 0 is returned.
            num_remote: Number of values, after the first one, in the tuple that the function
                returns. They stay in the object store, and an answer is a list of the first value
                and references to the others.
        """
        import ray

        # The name that Ray shows in the title of the process and in the dashboard.
        name = f"{self._class_name}.{function.__name__}"
        call_part = partial(_on_part, function, dict(common_kwargs))
        is_single = self.world_size == 1
        shared = call_part if is_single else ray.put(call_part)
        parts = [
            (stored, index)
            for group in shared_parts
            for stored in [group if is_single else ray.put(group)]
            for index in range(len(group))
        ]
        pending: list[Any] = []
        remote: list[Sequence[Any]] = []
        first: list[int] = []
        for part, ranks in zip(parts, self.sharding.along(axis), strict=True):
            first.append(len(pending))
            for rank in ranks:
                call = self._workers[rank].__ray_call__.options(
                    name=name, num_returns=1 + num_remote
                )
                answer = call.remote(shared, *part)
                pending.append(answer[0] if num_remote else answer)
                if rank == ranks[0]:
                    remote.append(answer[1:] if num_remote else [])
        answers = self.finish(pending, timeout_seconds)
        values = [answers[number] for number in first]
        if not num_remote:
            return values
        return [[value, *blocks] for value, blocks in zip(values, remote, strict=True)]

    def start_single_worker(
        self, method: str, *args: Any, rank: int = 0, num_remote: int = 0, **kwargs: Any
    ) -> Any:
        """Calls one worker without waiting.

        Returns:
            A reference for `finish`. Another group's method takes it as an argument, so that large
            values never pass through this process. With `num_remote`, a list of that reference and
            of references to `num_remote` values that stay in the object store.
        """
        call = getattr(self._workers[rank], method)
        if num_remote:
            call = call.options(num_returns=1 + num_remote)
        return call.remote(*args, **kwargs)

    def finish(self, pending: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
        """Waits for the values of references, in order.

        The first failure ends the wait, even if other ranks still run, for example in a collective
        with the failed rank.
        """
        return finish_together([(self, pending)], timeout_seconds)[0]

    def records(self) -> list[Path]:
        """Files in which ranks have recorded their last collectives, since this group started.

        A rank writes a file only when a collective of NCCL times out.
        """
        if self._records is None:
            return []
        prefix = Path(self._records)
        group = prefix.name.removesuffix("rank_")  # an engine's number may follow
        paths = sorted(prefix.parent.glob(f"{group}*"))
        return [path for path in paths if path.stat().st_mtime >= self._started]

    def names_of_actors(self) -> dict[Any, str]:
        """Returns the name of each worker in messages, by the id of its actor."""
        return {
            worker._actor_id: f"worker {rank} of {self.name!r}"
            for rank, worker in enumerate(self._workers)
        }

    def shutdown(self) -> None:
        """Ends the workers, also those that hang; may be called again."""
        import ray

        usage.unwatch(self)
        for worker in self._workers:
            ray.kill(worker)
        if self._workers:
            self._cluster.release(self.name)
        self._workers = []


def finish_together(
    pending: Sequence[tuple[RayWorkerGroup, Sequence[Any]]], timeout_seconds: float | None = None
) -> list[list[Any]]:
    """Waits like `RayWorkerGroup.finish`, for groups that communicate with one another."""
    workers = {key: name for group, _ in pending for key, name in group.names_of_actors().items()}
    references = [reference for _, each in pending for reference in each]
    try:
        values = iter(wait_for_all(references, workers=workers, timeout_seconds=timeout_seconds))
    except Exception as error:
        for group, _ in pending:
            group.is_broken |= group.world_size > 1 or isinstance(error, WorkerLostError)
        records = [str(path) for group, _ in pending for path in group.records()]
        if records:
            raise _with_records(error, records) from error
        raise
    return [[next(values) for _ in each] for _, each in pending]


def _with_records(error: Exception, records: Sequence[str]) -> Exception:
    note = f"the last collectives of each rank are recorded in {', '.join(records)}"
    if not isinstance(error, NemoRLError):
        error.add_note(note)
        return error
    got = f"{error.got}; {note}" if error.got else note
    extended = type(error)(error.problem, error.expected, got, error.fix)
    for earlier in getattr(error, "__notes__", ()):
        extended.add_note(earlier)
    return extended


def _on_part(
    function: Callable[..., Any], options: Mapping[str, Any], worker: Any, parts: Any, index: int
) -> Any:
    return function(worker, parts[index], **options)


def _item(value: Any, coordinates: tuple[int, ...]) -> Any:
    for coordinate in coordinates:
        value = value[coordinate]
    return value


_SECONDS_FOR_THE_CAUSE = 10.0
_NUM_FRAMES = 4
_MOST_CHARACTERS = 1000
_RAISED = re.compile(r"^(?:\w+\.)*(\w+: .*)", re.MULTILINE)
"""Lines of a trace that name an exception and its message."""
_OUT_OF_GPU_MEMORY = re.compile(
    r"^OutOfMemoryError|CUDA (error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure \d* ?'out of memory'"
)
_WORDS_OF_COLLECTIVES = ("gloo", "nccl", "process group", "connection closed by peer", "timed out")


def wait_for_all(
    pending: Sequence[Any],
    *,
    workers: Mapping[Any, str],
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Waits until all references have values, or one of them has failed.

    If a rank fails, collectives of the others break or hang. The first failure therefore ends the
    wait. After one that looks like a broken collective, the wait continues for some seconds, to
    report the rank that broke it.

    Args:
        workers: Name of each actor in messages, by its id, such as worker 0 of 'training'.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    values: dict[Any, Any] = {}
    waiting, follower = list(pending), None
    deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    while waiting and time.monotonic() < deadline:
        seconds_left = max(0.0, deadline - time.monotonic())
        ready, waiting = ray.wait(
            waiting, timeout=None if seconds_left == float("inf") else seconds_left
        )
        if waiting:  # all others that are ready, in one call: there may be thousands
            others, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready += others
        for reference in ready:
            try:
                values[reference] = ray.get(reference)
            except (RayTaskError, RayActorError) as error:
                described = _described(error, worker=_worker_of(reference, workers))
                if not _is_of_a_collective(error):
                    raise described from error
                if follower is None:
                    follower, deadline = described, time.monotonic() + _SECONDS_FOR_THE_CAUSE
    if follower is not None:
        raise follower
    if waiting:
        raise WorkerLostError(
            f"{_worker_of(waiting[0], workers)} did not answer in time",
            expected=f"an answer within {timeout_seconds} s",
            got=f"{len(waiting)} of {len(pending)} workers still running",
            fix="raise the timeout if the work takes that long",
        )
    return [values[reference] for reference in pending]


def _worker_of(reference: Any, workers: Mapping[Any, str]) -> str:
    return workers.get(reference.task_id().actor_id(), "a worker")


def _is_of_a_collective(error: Exception) -> bool:
    cause = getattr(error, "cause", None)
    if isinstance(cause, TransferError):
        return True
    message = str(cause).lower()
    return isinstance(cause, RuntimeError) and any(
        word in message for word in _WORDS_OF_COLLECTIVES
    )


def _described(error: Any, *, worker: str) -> NemoRLError:
    from ray.exceptions import RayTaskError

    trace = str(error)
    if not isinstance(error, RayTaskError):
        if getattr(error, "actor_init_failed", False):  # only its trace is left
            messages = _RAISED.findall(trace)
            return _error_with_trace(
                f"{worker} could not start: {messages[-1] if messages else trace}", trace
            )
        return WorkerLostError(
            f"{worker} died",
            got=trace.splitlines()[0],
            fix="the cause is often memory: lower max_tokens_per_microbatch or "
            "generation.kv_cache_gib; then run the same command again, it resumes from the last "
            "save",
        )
    cause = error.cause
    if isinstance(cause, NemoRLError):
        raised = type(cause)(*cause.args)
        raised.add_note(f"raised by {worker} on {_where(trace)}")
        return raised
    if _OUT_OF_GPU_MEMORY.search(f"{type(cause).__name__}: {cause}"):
        return ResourceError(
            f"{worker} needs more GPU memory than there is",
            expected="a step that fits into the GPU; `nemo-rl plan RECIPE` shows its memory",
            got=_summary(cause)[:_MOST_CHARACTERS],
            fix="in training lower max_tokens_per_microbatch, or set "
            "training.activation_checkpointing: true; in an engine lower "
            "generation.gpu_memory_utilization or generation.max_num_seqs; then run the same "
            "command again",
        )
    return _error_with_trace(f"{worker} raised {_summary(cause)}", trace)


def _error_with_trace(problem: str, trace: str) -> WorkerError:
    frames = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File ")]
    return WorkerError(
        problem[:_MOST_CHARACTERS],
        got="\n    ".join([f"on {_where(trace)}", *frames[-_NUM_FRAMES:]]),
        fix="the worker's full trace is in the log",
    )


def _where(trace: str) -> str:
    # Ray raises an exception of the cause's type; only its text has the host and process.
    match = re.search(r"pid=(\d+), ip=([^,)\s]+)", trace)
    return f"host {match[2]}, process {match[1]}" if match else "an unknown host"


def _summary(cause: Exception) -> str:
    """Returns type and message, also of an exception of which Ray could only send the trace."""
    _, unsent, trace = str(cause).partition("Original exception details:\n")
    raised = [*re.finditer(r"^(?:\w+\.)*(\w+: )", trace, re.MULTILINE)]
    if unsent and raised:
        return trace[raised[-1].start(1) :].strip()
    return f"{type(cause).__name__}: {cause}"
