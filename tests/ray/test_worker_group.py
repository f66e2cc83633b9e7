"""Worker groups: ordered answers, errors that name the worker, and no endless waits."""

import os
import signal
import time
from contextlib import redirect_stderr
from io import StringIO

import pydantic
import pydantic.dataclasses
import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.errors import DataError, MachineError, ResourceError, WorkerError


class Worker:
    """Methods that tests call on a worker."""

    def __init__(self) -> None:
        self.calls = 0

    def process(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, value: object, *, wait_seconds: float = 0.0) -> object:
        self.calls += 1
        time.sleep(wait_seconds)
        return value

    def pair(self, value: int) -> tuple[int, int]:
        return value, value + 1

    def divide(self, number: int) -> float:
        return 1 / number

    def refuse(self) -> None:
        raise DataError("row 7 is empty", expected="text", got="''", fix="fill it")

    def misconfigure(self) -> None:
        """Raises pydantic's error, like vLLM with a wrong setting; it cannot be pickled."""
        Limits(4, 2)

    def exhaust(self) -> None:
        """Raises the error of torch's allocator on a full GPU."""
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def die(self) -> None:
        os._exit(3)

    def print_when_dropping(self, *, is_ended: bool) -> str:
        """Returns the output of a `__del__` in which this process ends, or which fails."""
        with redirect_stderr(StringIO()) as printed:
            Dropped(is_ended=is_ended)
        return printed.getvalue()


class Unstartable:
    def __init__(self) -> None:
        raise KeyError("no such layer")

    def echo(self) -> None:
        """Never called."""


@pydantic.dataclasses.dataclass
class Limits:
    low: int
    high: int

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> "Limits":
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Dropped:
    """Ends its process when it is deleted, like Ray from outside, or fails then."""

    def __init__(self, *, is_ended: bool) -> None:
        self._is_ended = is_ended

    def __del__(self) -> None:
        if self._is_ended:
            os.kill(os.getpid(), signal.SIGTERM)
        raise LookupError("what Python cannot raise here")


@pytest.fixture(scope="module")
def group(session: ClusterSession):
    workers = RayWorkerGroup(session.cluster, Worker, name="echo", env_vars={"ANSWER": "42"})
    yield workers
    workers.shutdown()


def test_answers_come_in_the_order_of_the_calls(group: RayWorkerGroup) -> None:
    pending = [group.start_single_worker("echo", number) for number in range(5)]
    assert group.finish(list(reversed(pending))) == [4, 3, 2, 1, 0]
    assert group.run_all_workers_single_data("echo", "x") == ["x"]
    assert group.run_single_worker("echo", [1], wait_seconds=0.01) == [1]
    assert group.world_size == 1


def test_a_reference_is_an_argument_like_any_other(group: RayWorkerGroup) -> None:
    # The value does not pass through this process.
    assert group.run_single_worker("echo", group.start_single_worker("echo", 8)) == 8


def test_a_worker_is_a_process_with_its_own_environment(group: RayWorkerGroup) -> None:
    assert group.run_single_worker("process") != os.getpid()
    assert group.run_single_worker("environment", "ANSWER") == "42"


def test_an_error_of_a_worker_names_worker_and_cause(group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.run_single_worker("divide", 0)
    assert caught.value.problem.startswith("worker 0 of 'echo' raised ZeroDivisionError: division")
    assert "log" in caught.value.fix
    assert caught.value.got.startswith("on host ")
    assert ", in divide" in caught.value.got
    assert len(str(caught.value).splitlines()) < 10
    assert group.run_single_worker("divide", 4) == 0.25


def test_a_worker_without_gpu_memory_reports_what_to_lower(group: RayWorkerGroup) -> None:
    with pytest.raises(ResourceError) as caught:
        group.run_single_worker("exhaust")
    assert caught.value.problem == "worker 0 of 'echo' needs more GPU memory than there is"
    assert caught.value.got.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert "nemo-rl plan" in caught.value.expected
    for option in ("max_tokens_per_microbatch", "training.activation_checkpointing: true"):
        assert option in caught.value.fix


def test_a_worker_whose_constructor_raises_is_not_a_lost_one(session: ClusterSession) -> None:
    workers = RayWorkerGroup(session.cluster, Unstartable, name="broken")
    with pytest.raises(WorkerError) as caught:
        workers.run_single_worker("echo")
    assert not isinstance(caught.value, MachineError)
    assert caught.value.problem == "worker 0 of 'broken' could not start: KeyError: 'no such layer'"
    assert ", in __init__" in caught.value.got
    workers.shutdown()


def test_errors_that_ray_cannot_send_keep_their_message(group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.run_single_worker("misconfigure")
    message = "worker 0 of 'echo' raised ValidationError: 1 validation error for Limits\n"
    assert caught.value.problem.startswith(message)
    assert "low is above high" in caught.value.problem
    assert ", in misconfigure" in caught.value.got


def test_errors_of_this_project_are_raised_unchanged(group: RayWorkerGroup) -> None:
    with pytest.raises(DataError) as caught:
        group.run_all_workers_single_data("refuse")
    assert str(caught.value) == "row 7 is empty\n  expected: text\n  got: ''\n  fix: fill it"
    assert caught.value.__notes__[0].startswith("raised by worker 0 of 'echo' on host ")


def test_a_worker_that_dies_is_an_error_not_a_hang(session: ClusterSession) -> None:
    workers = RayWorkerGroup(session.cluster, Worker, name="mortal")
    assert workers.run_single_worker("echo", 1) == 1
    with pytest.raises(WorkerError, match="worker 0 of 'mortal' died") as caught:
        workers.run_single_worker("die")
    assert "resumes from the last save" in caught.value.fix
    with pytest.raises(WorkerError, match="died"):
        workers.run_single_worker("echo", 2)
    workers.shutdown()
    workers.shutdown()


def test_a_worker_that_is_ended_prints_no_trace(group: RayWorkerGroup) -> None:
    assert group.run_single_worker("print_when_dropping", is_ended=True) == ""
    assert "LookupError" in group.run_single_worker("print_when_dropping", is_ended=False)


def test_a_worker_is_kept_until_its_key_changes(session: ClusterSession) -> None:
    first, was_new = session.workers(Worker, name="kept", key="a")
    again, new_again = session.workers(Worker, name="kept", key="a")
    assert was_new
    assert not new_again
    assert again is first
    process = first.run_single_worker("process")
    other, new_other = session.workers(Worker, name="kept", key="b", env_vars={"ANSWER": "1"})
    assert new_other
    assert other.run_single_worker("process") != process
    assert other.run_single_worker("environment", "OMP_NUM_THREADS") == "1"
    assert first.world_size == 0
    session.discard("kept")
    session.discard("kept")
    assert other.world_size == 0


@pytest.mark.parametrize(
    ("bundles", "use_gpus", "missing"),
    [
        ([1], True, "1 GPUs"),
        ([10_000], False, "10000 CPU cores"),
        ([5_000, 5_000], False, "10000 CPU cores"),
    ],
)
def test_more_than_the_cluster_has_is_refused_at_once(
    session: ClusterSession, bundles: list[int], use_gpus: bool, missing: str
) -> None:
    start = time.monotonic()
    with pytest.raises(ResourceError, match="the cluster is smaller than") as caught:
        RayVirtualCluster(bundles, use_gpus=use_gpus).bundles()
    assert time.monotonic() - start < 100
    assert caught.value.expected == missing
    assert "CPU" in caught.value.got
    assert "laptop" in caught.value.fix


def test_used_bundles_are_waited_for_and_then_refused(session: ClusterSession) -> None:
    import ray

    session.cluster.bundles()
    cores = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ResourceError, match=r"did not free \d+ bundles") as caught:
        # All cores, of which the session uses one.
        RayVirtualCluster([cores], use_gpus=False, wait_seconds=1).bundles()
    assert caught.value.got.endswith(f"of {cores} CPU")


def test_a_group_beyond_the_cluster_is_refused_immediately(session: ClusterSession) -> None:
    with RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as cluster:
        first, second = (RayWorkerGroup(cluster, Worker, name=name) for name in ("one", "two"))
        with pytest.raises(ResourceError, match="no bundle of the cluster has room") as caught:
            RayWorkerGroup(cluster, Worker, name="three")
        assert caught.value.got == "one, two"
        first.shutdown()
        first.shutdown()
        third = RayWorkerGroup(cluster, Worker, name="three")
        assert third.run_single_worker("echo", 3) == second.run_single_worker("echo", 3)


def test_a_cluster_counts_its_bundles() -> None:
    cluster = RayVirtualCluster([2, 0, 3], use_gpus=False)
    assert (cluster.world_size, cluster.node_count) == (5, 2)
    cluster.shutdown()
    with pytest.raises(ResourceError, match="too few GPUs for its bundles"):
        RayVirtualCluster([4, 8], num_gpus_per_node=4)


def test_two_cluster_settings_have_their_workers_in_one_process(session: ClusterSession) -> None:
    """Both have the name of their shape, and Ray refuses duplicate names."""
    from nemo_rl_core.distributed import session as sessions

    config = ClusterConfig(num_threads=2)
    other = sessions.connect(config)
    try:
        assert (other.cluster.name, other is session) == (session.cluster.name, False)
        assert len(session.cluster.bundles()) == len(other.cluster.bundles()) == 1
    finally:
        other.shutdown()
        del sessions._sessions[config]


def test_a_session_is_shared_by_equal_shapes(session: ClusterSession) -> None:
    from nemo_rl_core.distributed.session import connect

    assert connect(ClusterConfig(num_threads=1)) is session
