"""`nemo-rl schedule` with a real client and real launch plans on Flyte's protocol."""

import json
import re
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner, Result
from flyteidl.admin import launch_plan_pb2, task_pb2
from flyteidl.core import tasks_pb2
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import Config, Image, ImageConfig, SerializationSettings
from flytekit.models.admin.workflow import WorkflowSpec
from flytekit.models.launch_plan import LaunchPlan
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable

from tasks.pods import registry
from tests.commands import REPOSITORY
from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.launch_plans import refusals
from workflows import cli
from workflows.sft import sft

WORKFLOW = "workflows.sft.sft"
PYFLYTE = "flytekit.clis.sdk_in_container.pyflyte"
NIGHTLY = ["sft_arithmetic", "0 2 * * *"]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Backend(tmp_path / "flyte") as started:
        yield started


def settings(version: str) -> SerializationSettings:
    return SerializationSettings(
        ImageConfig(default_image=Image("unused", "nemo-rl-unused", "0")),
        project="flytesnacks",
        domain="development",
        version=version,
    )


def registered(backend: Backend, version: str) -> None:
    """Registers the workflow without its tasks, which a schedule does not name."""
    spec = get_serializable(OrderedDict(), settings(version), sft)
    client = SynchronousFlyteClient(Config.auto(str(backend.config)).platform)
    client.create_workflow(spec.template.id, spec)


def invoked(backend: Backend, *arguments: str) -> Result:
    options = ["--flyte-config", str(backend.config), "--project", "flytesnacks"]
    return CliRunner().invoke(cli.group, ["schedule", *arguments, *options])


def listed(backend: Backend) -> list[dict[str, Any]]:
    result = invoked(backend, "list", "--json")
    assert result.exit_code == 0, result.output
    schedules: list[dict[str, Any]] = json.loads(result.output)
    return schedules


def recipe_of(spec: launch_plan_pb2.LaunchPlanSpec) -> dict[str, Any]:
    """Returns the recipe that a scheduled run starts with."""
    assert not spec.fixed_inputs.literals, "a launch by hand may give another recipe"
    scalar = spec.default_inputs.parameters["config"].default.scalar
    recipe: dict[str, Any] = msgpack.loads(scalar.binary.value)
    return recipe


def test_a_custom_recipe_runs_on_a_schedule(backend: Backend) -> None:
    registered(backend, "v1")
    result = invoked(backend, *NIGHTLY, "seed=7", "--name", "mine", "--notify", "a@example.com")
    assert result.exit_code == 0, result.output
    assert result.output.count(" 02:00") == 3
    # The command that is shown finds the schedule again.
    shown = result.output.partition("to start: nemo-rl schedule ")[2].split()
    assert shown[:2] == ["resume", "mine"]
    assert {"--project", "flytesnacks", "--domain", str(backend.config)} <= set(shown)
    ((name, version), spec) = next(iter(backend.launch_plans.items()))
    assert name == "mine"
    assert version.startswith("v1-")
    assert (spec.workflow_id.name, spec.workflow_id.version) == (WORKFLOW, "v1")
    assert spec.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    assert spec.concurrency_policy.max == 1
    assert spec.concurrency_policy.behavior == launch_plan_pb2.CONCURRENCY_LIMIT_BEHAVIOR_SKIP
    (notification,) = spec.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["a@example.com"]
    recipe = recipe_of(spec)
    assert recipe["seed"] == 7
    assert recipe["data"]["kind"] == "arithmetic"
    assert backend.active == {}


def test_a_schedule_is_paused_and_resumed(backend: Backend) -> None:
    registered(backend, "v1")
    assert invoked(backend, *NIGHTLY, "--activate").exit_code == 0
    (first,) = listed(backend)
    assert (first["name"], first["cron"], first["active"]) == ("sft_arithmetic", "0 2 * * *", True)
    # The same recipe keeps its version; another recipe has another version, active immediately.
    assert invoked(backend, *NIGHTLY, "--activate").exit_code == 0
    assert listed(backend) == [first]
    assert invoked(backend, *NIGHTLY, "seed=3", "--activate").exit_code == 0
    (second,) = listed(backend)
    assert second["version"] != first["version"]
    assert len(backend.launch_plans) == 2

    assert "is paused" in invoked(backend, "pause", "sft_arithmetic").output
    assert backend.active == {}
    assert "paused" in invoked(backend, "list").output
    assert "next 20" in invoked(backend, "resume", "sft_arithmetic").output
    assert backend.active == {"sft_arithmetic": second["version"]}


def test_the_limit_of_the_recipe_reaches_the_containers_of_its_runs(backend: Backend) -> None:
    registered(backend, "v1")
    assert invoked(backend, *NIGHTLY, "--name", "free").exit_code == 0
    assert invoked(backend, *NIGHTLY, "budget.max_gpu_hours=12.5", "--name", "mine").exit_code == 0
    variables = {
        name: [(each.key, each.value) for each in spec.envs.values]
        for (name, _), spec in backend.launch_plans.items()
    }
    assert variables == {"free": [], "mine": [("NEMO_RL_MAX_GPU_HOURS", "12.5")]}


def test_runs_have_the_labels_of_their_schedule(backend: Backend) -> None:
    registered(backend, "v1")
    queue, priority = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
    assert invoked(backend, *NIGHTLY).exit_code == 0
    result = invoked(backend, *NIGHTLY, f"--label={queue}=training", "--label", f"{priority}=low")
    assert result.exit_code == 0, result.output
    assert f"labels:   {priority}=low, {queue}=training" in result.output
    # Other labels make another version; each plan keeps the labels that identify it.
    first, second = (dict(spec.labels.values) for spec in backend.launch_plans.values())
    assert first == {"app.kubernetes.io/part-of": "nemo-rl-flow", "purpose": "schedule"}
    assert second == {**first, queue: "training", priority: "low"}
    (schedule,) = listed(backend)
    assert schedule["labels"] == {queue: "training", priority: "low"}
    assert f"paused  {priority}=low  {queue}=training" in invoked(backend, "list").output


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        config = tmp_path / "flyte.yaml"
        config.write_text(f"admin:\n  endpoint: dns:///{address}\n  insecure: true\n")
        arguments = ["schedule", "list", "--flyte-config", str(config)]
        result = CliRunner().invoke(cli.group, arguments)
    assert result.exit_code == 2
    assert "the schedules cannot be read or changed on" in result.output
    assert "fix: look at endpoint, insecure and authType" in result.output
    assert address in result.output


def test_workflows_registered_without_a_registry_are_not_scheduled_on_a_cluster(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(backend, "v1")
    template = tasks_pb2.TaskTemplate(container=tasks_pb2.Container(image="nemo-rl-light:0"))
    backend.tasks["light", "v1"] = task_pb2.TaskSpec(template=template)
    monkeypatch.setattr(registry, "is_of_this_machine", lambda _endpoint: False)
    result = invoked(backend, *NIGHTLY)
    assert result.exit_code == 2
    assert f"{WORKFLOW} of version v1 was registered without a registry" in result.output
    assert "got: nemo-rl-light:0" in result.output
    assert backend.launch_plans == {}
    template.container.image = "registry.invalid/team/nemo-rl-light:0"
    backend.tasks["light", "v1"] = task_pb2.TaskSpec(template=template)
    assert invoked(backend, *NIGHTLY).exit_code == 0


@pytest.mark.slow
def test_a_launch_plan_is_activated_like_by_register_sh(backend: Backend) -> None:
    # Imported here, since launch plans read their addresses at import.
    from workflows.launch_plans import nightly_collection

    specs: OrderedDict[Any, Any] = OrderedDict()
    get_serializable(specs, settings("v1"), nightly_collection)
    client = SynchronousFlyteClient(Config.auto(str(backend.config)).platform)
    makers = {
        TaskSpec: client.create_task,
        WorkflowSpec: client.create_workflow,
        LaunchPlan: client.create_launch_plan,
    }
    for spec in [each for each in specs.values() if type(each) in makers]:
        identifier = spec.id if isinstance(spec, LaunchPlan) else spec.template.id
        makers[type(spec)](identifier, getattr(spec, "spec", spec))
    assert backend.active == {}
    line = re.search(
        r'(?m)^  "\$bin/pyflyte" --config "\$config" (launchplan .*\\\n.*)$',
        (REPOSITORY / "deployment/register.sh").read_text(),
    )
    assert line is not None
    variables = f"project=flytesnacks domain=development plan={nightly_collection.name} version=v1"
    command = f"{variables}\n{sys.executable} -m {PYFLYTE} --config {backend.config} {line[1]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert backend.active == {"nightly_collection": "v1"}


def test_the_latest_registered_code_runs_unless_another_is_named(backend: Backend) -> None:
    for version in ("v1", "v2"):
        registered(backend, version)
    assert invoked(backend, *NIGHTLY, "--name", "a").exit_code == 0
    assert invoked(backend, *NIGHTLY, "--name", "b", "--version", "v1").exit_code == 0
    assert {each["name"]: each["workflow_version"] for each in listed(backend)} == {
        "a": "v2",
        "b": "v1",
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*NIGHTLY], "the workflow workflows.sft.sft is not registered"),
        ([*NIGHTLY, "--version", "v9"], "the cluster does not accept the schedule sft_arithmetic"),
        (["sft_arithmetic", "0 2 * * 7"], "'0 2 * * 7' is not a schedule"),
        (["sft_arithmetic", "0 2 * * *", "sft.num_step=1"], "num_step"),
        ([*NIGHTLY, "--label", "queue=a queue"], "'queue=a queue' is not a label"),
        (["nothing", "0 2 * * *"], "it is not clear which pipeline"),
        (["pause", "mine"], "there is no active schedule 'mine'"),
        (["resume", "mine"], "there is no schedule 'mine'"),
        (["sft_arithmetic", "0 2 * * *", "data={kind: file, train: /no/rows.jsonl}"],
         "data.train: the cluster cannot read /no/rows.jsonl"),
    ],
)  # fmt: skip
def test_invalid_schedules_are_refused(
    backend: Backend, arguments: list[str], problem: str
) -> None:
    result = invoked(backend, *arguments)
    assert result.exit_code == 2, result.output
    assert problem in result.output
    assert backend.launch_plans == {}


def test_the_backend_refuses_the_same_as_flyteadmin(backend: Backend) -> None:
    """Each fault is put separately into a valid launch plan."""
    registered(backend, "v1")
    assert invoked(backend, *NIGHTLY, "--notify", "a@example.com").exit_code == 0
    (name, version), spec = next(iter(backend.launch_plans.items()))
    interface = backend.workflow(WORKFLOW, "v1").interface

    def refusals_after(change: str) -> str:
        request = launch_plan_pb2.LaunchPlanCreateRequest(spec=spec)
        request.id.CopyFrom(spec.workflow_id)
        request.id.resource_type, request.id.name, request.id.version = 3, name, version
        changed = request.spec
        match change:
            case "cron":
                changed.entity_metadata.schedule.cron_schedule.schedule = "0 2 * * 7"
            case "expression":
                changed.entity_metadata.schedule.cron_expression = "0 2 * * ? *"
            case "input":
                del changed.default_inputs.parameters["config"]
            case "unknown":
                changed.fixed_inputs.literals["confg"].scalar.none_type.SetInParent()
            case "label":
                changed.labels.values["purpose"] = "a purpose"
            case "phase":
                changed.entity_metadata.notifications[0].phases.append(2)
            case "project":
                request.id.project = "another"
            case "version":
                request.id.version = ""
        return "; ".join(refusals(request, interface, projects={("flytesnacks", "development")}))

    assert refusals_after("nothing") == ""
    assert "failed to parse '7'" in refusals_after("cron")
    assert "deprecated" in refusals_after("expression")
    assert "unbound input [config]" in refusals_after("input")
    assert "unexpected fixed_input confg" in refusals_after("unknown")
    assert "invalid label value [a purpose]" in refusals_after("label")
    assert "invalid phase" in refusals_after("phase")
    assert "project another" in refusals_after("project")
    assert "missing version" in refusals_after("version")
