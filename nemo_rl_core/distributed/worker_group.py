"""One plain class, spawned once a bundle and driven by method name, and its ranks' answers."""

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
"""In the environment of a worker: Ray leaves it all GPUs of the machine, of which `own_gpu` is its.

Ranks that read one another's memory, such as those of vLLM's custom all-reduce, must see it.
"""


class RayWorkerGroup:
    """Ray actors of one class, rank by rank over a cluster's bundles.

    The class stays plain: `ray.remote` is applied here, so that a test can build it directly.
    Several workers find in their environment what `join_process_group` reads; one alone finds
    nothing, and is the process that it would be without a group. Ray shows a worker only its own
    GPU, as device 0, unless `SEES_ALL_GPUS` is in its environment.

    Args:
        cluster: Where the workers live.
        worker_class: A class whose constructor takes no arguments but `worker_kwargs`.
        name: The word for these workers in messages; by default the class's name.
        sharding: The named axes of the ranks; by default one axis, `data_parallel`.
        env_vars: Environment of the worker processes, set before they import anything.
        num_workers: How many, from the first bundle on; by default one a bundle.
        worker_kwargs: For the constructor.

    Raises:
        ResourceError: When too many groups share the cluster already, or it has too few bundles.
        WorkerError: When a method raises in a worker, or a worker dies: once, with its rank, host
            and trace. A `NemoRLError` from a worker is raised as it is.
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
        share = cluster.admit(self.name)  # after all that may fail: nobody would count it out
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
        """CPU seconds of each worker that answers in time, by its id; others count as before."""
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
        """How many workers there are."""
        return len(self._workers)

    def is_on(self, cluster: RayVirtualCluster) -> bool:
        """Whether the workers live on the bundles of that cluster."""
        return self._cluster is cluster

    def machines(self) -> list[str]:
        """Ray's id of the machine of each worker, in rank order."""
        return [bundle.node for bundle in self._cluster.bundles()[: self.world_size]]

    def run_single_worker(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
        """Calls one worker and waits for its answer."""
        return self.finish([getattr(self._workers[rank], method).remote(*args, **kwargs)])[0]

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls every worker with the same arguments; answers in rank order."""
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
        """Calls workers with the shard that belongs to their place on the named axes.

        Args:
            method: Of the workers.
            in_sharded_axes: Axes that tell shards apart: each of `kwargs` is a list by the
                coordinate on the first of them, of lists by that on the second, and so on.
            replicate_on_axes: Axes along which workers get the same shard. Of an axis that is
                named in neither, only the workers at coordinate 0 are called.
            output_is_replicated: Axes along which workers return the same; of these, the answer at
                coordinate 0 stands for all.
            common_kwargs: Arguments that every worker gets whole.
            timeout_seconds: How long to wait for the answers at most; None waits for ever.
            **kwargs: Arguments by shard.

        Returns:
            Answers in rank order: with one sharded axis, the others replicated in and out, one
            for each shard, in order.
        """
        import ray

        called = {*in_sharded_axes, *replicate_on_axes}
        idle = [axis for axis in self.sharding.names if axis not in called]
        shared: dict[tuple[int, ...], dict[str, Any]] = {}
        pending, answering = [], []
        for rank in self.sharding.ranks(**dict.fromkeys(idle, 0)):
            at = self.sharding.coordinates(rank)
            place = tuple(at[axis] for axis in in_sharded_axes)
            if place not in shared:  # stored once, however many ranks read it
                shared[place] = {key: ray.put(_item(value, place)) for key, value in kwargs.items()}
            call = getattr(self._workers[rank], method)
            pending.append(call.remote(**shared[place], **(common_kwargs or {})))
            answering.append(all(at[axis] == 0 for axis in output_is_replicated))
        answers = zip(self.finish(pending, timeout_seconds), answering, strict=True)
        return [answer for answer, wanted in answers if wanted]

    def run_all_workers_on_parts(
        self,
        function: Callable[..., Any],
        wholes: Sequence[Sequence[Any]],
        *,
        axis: str,
        common_kwargs: Mapping[str, Any],
        timeout_seconds: float | None = None,
        num_held: int = 0,
    ) -> list[Any]:
        """Calls a function in each worker, with its part of what it and its neighbours read.

        What is common to workers is stored once for all that read it: a call has references to it,
        and the number of the worker's part.

        Args:
            function: Gets the worker's object, its part, and `common_kwargs`.
            wholes: The parts of consecutive workers along `axis`, as they read them together.
            axis: That tells the parts apart. Workers along others get the same part, and the answer
                at coordinate 0 stands for theirs.
            common_kwargs: Arguments that every worker gets.
            timeout_seconds: How long to wait for the answers at most; None waits for ever.
            num_held: How many values the function returns, as a tuple, behind the first one. They
                stay where they were made, and an answer is a list of the first value and references
                to the others.

        Returns:
            An answer for each part, in order.
        """
        import ray

        # What Ray shows of the worker meanwhile, in the title of its process and on its page.
        name = f"{self._class_name}.{function.__name__}"
        given = partial(_on_part, function, dict(common_kwargs))
        is_alone = self.world_size == 1
        shared = given if is_alone else ray.put(given)
        parts = [
            (stored, place)
            for whole in wholes
            for stored in [whole if is_alone else ray.put(whole)]
            for place in range(len(whole))
        ]
        pending: list[Any] = []
        held: list[Sequence[Any]] = []
        first: list[int] = []
        for part, ranks in zip(parts, self.sharding.along(axis), strict=True):
            first.append(len(pending))
            for rank in ranks:
                call = self._workers[rank].__ray_call__.options(name=name, num_returns=1 + num_held)
                answer = call.remote(shared, *part)
                pending.append(answer[0] if num_held else answer)
                if rank == ranks[0]:
                    held.append(answer[1:] if num_held else [])
        answers = self.finish(pending, timeout_seconds)
        found = [answers[number] for number in first]
        if not num_held:
            return found
        return [[value, *blocks] for value, blocks in zip(found, held, strict=True)]

    def start_single_worker(
        self, method: str, *args: Any, rank: int = 0, num_held: int = 0, **kwargs: Any
    ) -> Any:
        """Calls one worker without waiting.

        Returns:
            A reference for `finish`; another group's method takes it as an argument, so that large
            values never pass through this process. With `num_held`, a list of it and of references
            to so many values that stay where they are made.
        """
        call = getattr(self._workers[rank], method)
        if num_held:
            call = call.options(num_returns=1 + num_held)
        return call.remote(*args, **kwargs)

    def finish(self, pending: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
        """Waits for the values that references stand for, in their order.

        The first failure ends the wait: what the other ranks do then, such as waiting in a
        collective for the one that failed, is nobody's business any more.
        """
        return finish_together([(self, pending)], timeout_seconds)[0]

    def records(self) -> list[Path]:
        """Files in which ranks have recorded their last collectives, since this group started.

        A rank writes its own when a collective of NCCL times out; there is none otherwise.
        """
        if self._records is None:
            return []
        prefix = Path(self._records)
        group = prefix.name.removesuffix("rank_")  # behind which an engine's number may stand
        found = sorted(prefix.parent.glob(f"{group}*"))
        return [path for path in found if path.stat().st_mtime >= self._started]

    def names_of_actors(self) -> dict[Any, str]:
        """What messages call each worker, by the id of its actor."""
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
    """As `RayWorkerGroup.finish`, for groups that do something with one another.

    Args:
        pending: Each group, and the references to its answers.
        timeout_seconds: For all of them; None waits for ever.

    Returns:
        The values of each group.
    """
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
    """The error with the files that say in which collective each rank was."""
    said = f"the last collectives of each rank are recorded in {', '.join(records)}"
    if not isinstance(error, NemoRLError):
        error.add_note(said)
        return error
    got = f"{error.got}; {said}" if error.got else said
    found = type(error)(error.problem, error.expected, got, error.fix)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _on_part(
    function: Callable[..., Any], options: Mapping[str, Any], worker: Any, whole: Any, place: int
) -> Any:
    return function(worker, whole[place], **options)


def _item(value: Any, place: tuple[int, ...]) -> Any:
    for coordinate in place:
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

    A rank that fails takes others with it: their collectives break, or hang. So the first failure
    ends the wait, and one that looks like a broken collective gives the rank that broke it some
    seconds to be heard.

    Args:
        pending: References to the answers of actors' methods.
        workers: What messages call each actor, by its id: worker 0 of 'training'.
        timeout_seconds: How long to wait at most; None waits for ever.

    Returns:
        The values, in the order of `pending`.

    Raises:
        WorkerError: If a worker raised.
        WorkerLostError: If a worker died, or did not answer in time.
        NemoRLError: As a worker raised it.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    values: dict[Any, Any] = {}
    waiting, follower = list(pending), None
    deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    while waiting and time.monotonic() < deadline:
        left = max(0.0, deadline - time.monotonic())
        ready, waiting = ray.wait(waiting, timeout=None if left == float("inf") else left)
        if waiting:  # the others that are ready by now, in one look: there may be thousands
            others, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready += others
        for reference in ready:
            try:
                values[reference] = ray.get(reference)
            except (RayTaskError, RayActorError) as error:
                found = _described(error, worker=_worker_of(reference, workers))
                if not _is_of_a_collective(error):
                    raise found from error
                if follower is None:
                    follower, deadline = found, time.monotonic() + _SECONDS_FOR_THE_CAUSE
    if follower is not None:
        raise follower
    if waiting:
        raise WorkerLostError(
            f"{_worker_of(waiting[0], workers)} did not answer in time",
            expected=f"an answer within {timeout_seconds} s",
            got=f"{len(waiting)} of {len(pending)} workers still at it",
            fix="raise the deadline if the work takes as long",
        )
    return [values[reference] for reference in pending]


def _worker_of(reference: Any, workers: Mapping[Any, str]) -> str:
    return workers.get(reference.task_id().actor_id(), "a worker")


def _is_of_a_collective(error: Exception) -> bool:
    cause = getattr(error, "cause", None)
    if isinstance(cause, TransferError):
        return True
    said = str(cause).lower()
    return isinstance(cause, RuntimeError) and any(word in said for word in _WORDS_OF_COLLECTIVES)


def _described(error: Any, *, worker: str) -> NemoRLError:
    from ray.exceptions import RayTaskError

    trace = str(error)
    if not isinstance(error, RayTaskError):
        if getattr(error, "actor_init_failed", False):  # an error, of which only the trace is left
            messages = _RAISED.findall(trace)
            return _of_a_trace(
                f"{worker} could not start: {messages[-1] if messages else trace}", trace
            )
        return WorkerLostError(
            f"{worker} died",
            got=trace.splitlines()[0],
            fix="often memory: lower max_tokens_per_microbatch or generation.kv_cache_gib; "
            "then run the same command again, it resumes from the last save",
        )
    cause = error.cause
    if isinstance(cause, NemoRLError):
        raised = type(cause)(*cause.args)
        raised.add_note(f"raised by {worker} on {_where(trace)}")
        return raised
    if _OUT_OF_GPU_MEMORY.search(f"{type(cause).__name__}: {cause}"):
        return ResourceError(
            f"{worker} needs more GPU memory than there is",
            expected="a step that fits into the GPU; `nemo-rl plan RECIPE` shows what one needs",
            got=_said(cause)[:_MOST_CHARACTERS],
            fix="in training lower max_tokens_per_microbatch, or set "
            "training.activation_checkpointing: true; in an engine lower "
            "generation.gpu_memory_utilization or generation.max_num_seqs; then run the same "
            "command again",
        )
    return _of_a_trace(f"{worker} raised {_said(cause)}", trace)


def _of_a_trace(problem: str, trace: str) -> WorkerError:
    frames = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File ")]
    return WorkerError(
        problem[:_MOST_CHARACTERS],
        got="\n    ".join([f"on {_where(trace)}", *frames[-_NUM_FRAMES:]]),
        fix="the worker's whole trace is in the log",
    )


def _where(trace: str) -> str:
    # Ray hands out an exception of the cause's type, in which only the text still says where.
    match = re.search(r"pid=(\d+), ip=([^,)\s]+)", trace)
    return f"host {match[2]}, process {match[1]}" if match else "an unknown host"


def _said(cause: Exception) -> str:
    """The type and the message, also of an exception that Ray could not send, only its trace."""
    _, unsent, trace = str(cause).partition("Original exception details:\n")
    raised = [*re.finditer(r"^(?:\w+\.)*(\w+: )", trace, re.MULTILINE)]
    if unsent and raised:
        return trace[raised[-1].start(1) :].strip()
    return f"{type(cause).__name__}: {cause}"
