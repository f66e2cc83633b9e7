"""`nemo-rl schedule --on-arrival` against Flyte's protocol on loopback, over rows in an S3 server.

The scheduler is this test, which launches the launch plan that looks; `test_day_by_day.py` has the
same with real containers.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner, Result
from flyteidl.core import tasks_pb2
from flytekit import FlyteContextManager
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import Config
from flytekit.models.common import NamedEntityIdentifier
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.models.execution import ExecutionMetadata, ExecutionSpec
from flytekit.models.literals import LiteralMap
from flytekit.tools.translator import get_serializable

from nemo_rl_core.errors import ResourceError
from tasks import cli
from tasks.look_for_rows import look_for_rows as look
from tasks.recipes.arrivals import WatchedRows
from tests.commands import REPOSITORY
from tests.workflows.flyte_backend import Backend, ExecutionRecord
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.flyte_backend.containers import ProcessContainer, Processes
from tests.workflows.test_schedule_command import settings
from workflows.arrivals import look_for_rows
from workflows.sft import sft

DATA = "data={kind: file, train: 's3://flyte-data/rows/*.jsonl'}"
MINE = ["sft_arithmetic", "*/10 * * * *", DATA, "--name", "mine", "--on-arrival"]
ROW = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def bucket(server: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for path in server.list(""):
        server.remove(path)
    server.write("rows/monday.jsonl", ROW)
    return server


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Backend(tmp_path / "flyte") as started:
        client = SynchronousFlyteClient(Config.auto(str(started.config)).platform)
        for workflow in (sft, look_for_rows):
            spec = get_serializable(OrderedDict(), settings("v1"), workflow)
            client.create_workflow(spec.template.id, spec)
        yield started


def invoked(backend: Backend, *arguments: str) -> Result:
    where = ["--config", str(backend.config), "--project", "flytesnacks"]
    return CliRunner().invoke(cli.group, ["schedule", *arguments, *where])


def done(backend: Backend, *arguments: str) -> str:
    result = invoked(backend, *arguments)
    assert result.exit_code == 0, result.output
    return result.output


def watched(backend: Backend, name: str = "mine") -> WatchedRows:
    """The input of the launch plan that is active."""
    spec = backend.launch_plans[f"{name}-arrivals", backend.active[f"{name}-arrivals"]]
    value = spec.default_inputs.parameters["config"].default.scalar.binary.value
    return WatchedRows.model_validate(msgpack.loads(value))


def looked(config: WatchedRows) -> str:
    """What the task does in its pod, after all rows have settled."""
    context = FlyteContextManager.current_context()
    params = context.user_space_params
    assert params is not None
    execution = WorkflowExecutionIdentifier("flytesnacks", "development", "look")
    given = params.builder()
    given.execution_id = execution
    state = context.new_execution_state().with_params(user_space_params=given.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        found: str = look.task_function(config=config)
    return found


def settled(config: WatchedRows) -> WatchedRows:
    return config.replace(settled_minutes=0)


def ended(backend: Backend, name: str) -> None:
    """Waits for an execution, which fails: the tasks of its workflow are not registered."""
    deadline = time.monotonic() + 60
    while backend.executions[name].phase == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert backend.executions[name].phase == "FAILED"


def test_two_launch_plans_are_registered(backend: Backend) -> None:
    output = done(backend, *MINE, "--settled", "5", "--tries", "3", "--label", "queue=training",
                  "--notify", "a@example.com")  # fmt: skip
    assert "schedule: mine, workflows.sft.sft of version v1" in output
    assert "\nlooks:    20" in output
    assert "labels:   queue=training" in output
    plans = {name: (version, spec) for (name, version), spec in backend.launch_plans.items()}
    version, run = plans["mine"]
    assert not run.entity_metadata.schedule.cron_schedule.schedule, "only rows start it"
    assert run.concurrency_policy.max == 1
    assert run.labels.values["queue"] == "training"
    _, looks = plans["mine-arrivals"]
    assert looks.workflow_id.name == "workflows.arrivals.look_for_rows"
    assert looks.entity_metadata.schedule.cron_schedule.schedule == "*/10 * * * *"
    assert looks.concurrency_policy.max == 1
    assert "queue" not in looks.labels.values, "a look waits in no queue"
    assert backend.active == {}
    done(backend, "resume", "mine")
    config = watched(backend)
    assert (config.schedule, config.version) == ("mine", version)
    assert (config.settled_minutes, config.num_tries) == (5, 3)
    assert [each.train for each in config.data] == ["s3://flyte-data/rows/*.jsonl"]
    assert config.insecure
    # The same again is the same.
    assert done(backend, *MINE, "--settled", "5", "--tries", "3", "--label", "queue=training",
                "--notify", "a@example.com")  # fmt: skip
    assert len(backend.launch_plans) == 2


def test_a_schedule_on_arrival_is_listed_paused_and_resumed(backend: Backend) -> None:
    done(backend, *MINE, "--activate")
    assert list(backend.active) == ["mine-arrivals"]
    (found,) = json.loads(done(backend, "list", "--json"))
    assert found["name"] == "mine"
    assert (found["workflow"], found["cron"]) == ("workflows.sft.sft", "*/10 * * * *")
    assert (found["active"], found["on_arrival"]) == (True, True)
    assert "*/10 * * * * on arrival" in done(backend, "list")
    assert "mine is paused" in done(backend, "pause", "mine")
    assert backend.active == {}
    assert "paused" in done(backend, "list")
    assert "looks 20" in done(backend, "resume", "mine")
    assert list(backend.active) == ["mine-arrivals"]


def test_a_schedule_by_the_clock_and_one_on_arrival_take_each_other_s_place(
    backend: Backend,
) -> None:
    by_the_clock = ["sft_arithmetic", "0 2 * * *", DATA, "--name", "mine", "--activate"]
    done(backend, *by_the_clock)
    assert list(backend.active) == ["mine"]
    done(backend, *MINE, "--activate")
    assert list(backend.active) == ["mine-arrivals"]
    done(backend, *by_the_clock)
    assert list(backend.active) == ["mine"]
    (found,) = json.loads(done(backend, "list", "--json"))
    assert not found["on_arrival"]
    # What stood last is what is paused and resumed, though it stood before, too.
    done(backend, "pause", "mine")
    (found,) = json.loads(done(backend, "list", "--json"))
    assert not found["on_arrival"]
    done(backend, "resume", "mine")
    assert list(backend.active) == ["mine"]
    done(backend, *MINE, "--activate")
    done(backend, "pause", "mine")
    done(backend, "resume", "mine")
    assert list(backend.active) == ["mine-arrivals"]


def test_new_rows_start_the_recipe_once(backend: Backend, bucket: S3Bucket) -> None:
    done(backend, *MINE, "--activate")
    config = watched(backend)
    assert "minutes ago: a run starts" in looked(config)
    assert backend.executions == {}
    said = looked(settled(config))
    (name,) = backend.executions
    assert said.startswith(f"new rows: {name} was started")
    record = backend.executions[name]
    assert record.launch_plan == "mine"
    assert record.labels["purpose"] == "schedule"
    recipe: dict[str, Any] = msgpack.loads(record.inputs.literals["config"].scalar.binary.value)
    assert recipe["data"]["train"] == "s3://flyte-data/rows/*.jsonl"
    ended(backend, name)
    assert f"{name} has failed on these rows" in looked(settled(config))
    record.phase = "SUCCEEDED"
    assert f"nothing new: {name} has run on these rows" in looked(settled(config))

    bucket.write("rows/tuesday.jsonl", ROW)
    record.phase = "RUNNING"
    assert "starts when the schedule's present run has ended" in looked(settled(config))
    assert list(backend.executions) == [name]
    record.phase = "ABORTED"
    assert "was started (2 objects" in looked(settled(config))
    assert len(backend.executions) == 2


def test_flyte_that_does_not_answer_is_named_with_the_variables(
    backend: Backend, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(backend, *MINE, "--activate")
    monkeypatch.setenv("FLYTE_PLATFORM_URL", "127.0.0.1:9")
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    with pytest.raises(ResourceError, match="it is not known which runs there were") as raised:
        looked(watched(backend))
    assert "127.0.0.1:9" in str(raised.value)
    for name in ("FLYTE_PLATFORM_URL", "FLYTE_CREDENTIALS_CLIENT_SECRET", "nemo-rl-secrets"):
        assert name in str(raised.value.fix)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sft_arithmetic", "0 2 * * *", "--on-arrival"], "can arrive"),
        (["sft_arithmetic", "0 2 * * *", "--tries", "2"], "--tries is only for a schedule that"),
        (["sft_arithmetic", "0 2 * * *", "--settled", "2"], "--settled is only for a schedule"),
        ([*MINE, "--name", "mine-arrivals"], "a schedule cannot be called mine-arrivals"),
        ([*MINE, "--tries", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_is_refused(backend: Backend, arguments: list[str], said: str) -> None:
    result = invoked(backend, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert backend.launch_plans == {}


class WithRows(Processes):
    """Starts containers that reach the rows, and kills the first that has started a run.

    Args:
        bucket: With the rows.
    """

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket
        self.backend: Backend | None = None
        self.num_killed = 0

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> ProcessContainer:
        before = self._num_runs()
        found = super().start(task, command, pod, environment | self._bucket.environment)
        if "look_for_rows" in task.id.name and not self.num_killed:
            threading.Thread(target=self._kill, args=(found, before), daemon=True).start()
        return found

    def _kill(self, container: ProcessContainer, before: int) -> None:
        while container.poll() is None and self._num_runs() == before:
            time.sleep(0.005)
        if container.poll() is None:
            os.killpg(container.pid, signal.SIGKILL)
            self.num_killed += 1

    def _num_runs(self) -> int:
        assert self.backend is not None
        return sum(each.launch_plan == "mine" for each in [*self.backend.executions.values()])


def start_look(backend: Backend, name: str) -> None:
    """What Flyte's scheduler does when it is time."""
    client = SynchronousFlyteClient(Config.auto(str(backend.config)).platform)
    project, domain = "flytesnacks", "development"
    plan = client.get_active_launch_plan(NamedEntityIdentifier(project, domain, "mine-arrivals"))
    mode = ExecutionMetadata.ExecutionMode.SCHEDULED
    spec = ExecutionSpec(plan.id, ExecutionMetadata(mode, "scheduler", 0))
    client.create_execution(project, domain, name, spec, LiteralMap({}))


def said(look: ExecutionRecord) -> str:
    """What a look returned."""
    text: str = look.outputs.literals["o0"].scalar.primitive.string_value
    return text


@pytest.mark.slow
def test_a_look_that_is_killed_after_the_start_starts_nothing_again(
    tmp_path: Path, bucket: S3Bucket
) -> None:
    machine = WithRows(bucket)
    with Backend(tmp_path / "flyte", machine=machine) as backend:
        machine.backend = backend
        register = [
            Path(sys.executable).with_name("pyflyte"), "--config", backend.config, "register",
            "--project", "flytesnacks", "--domain", "development", "--version", "v1",
            # Into the container's own folder: by default it is /root, which here is this machine's.
            "--copy", "all", "--destination-dir", ".", "workflows/arrivals.py",
        ]  # fmt: skip
        subprocess.run(register, cwd=REPOSITORY, check=True, capture_output=True, timeout=500)
        client = SynchronousFlyteClient(Config.auto(str(backend.config)).platform)
        spec = get_serializable(OrderedDict(), settings("v1"), sft)
        client.create_workflow(spec.template.id, spec)
        done(backend, *MINE, "--settled", "0", "--activate")
        start_look(backend, "look")
        deadline = time.monotonic() + 500
        while backend.executions["look"].phase == "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.1)
        look = backend.executions["look"]
        assert look.phase == "SUCCEEDED", look.error
        attempts = [each for node in look.nodes.values() for each in node.attempts]
        assert [each.exit_code for each in attempts] == [-signal.SIGKILL, 0]
        assert machine.num_killed == 1
        (name,) = backend.executions.keys() - {"look"}
        # It fails at once, since the tasks of its workflow are not registered.
        ended(backend, name)
        assert said(look).startswith(f"nothing new: {name} ")
