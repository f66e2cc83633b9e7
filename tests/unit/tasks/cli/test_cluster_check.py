"""`nemo-rl cluster-check` on Flyte's protocol with pods that never start."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.image_spec.image_spec import ImageBuildEngine
from flytekit.tools import fast_registration

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.cli.machine.flyte_cluster_check import NODES
from tasks.cluster_check import try_engines, try_ray
from tasks.pods import site_pods
from tasks.pods.site_pods import QUEUE_LABEL
from tests.schemas import problems, schema
from tests.schemas.ray_job import ray_job
from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.containers import Container
from workflows import cli


class NoRoom:
    """A machine whose pods stay pending."""

    pid = 0

    def start(self, *_: object) -> Container:
        return self

    def poll(self) -> int | None:
        return None

    def remove(self) -> None:
        """Does nothing."""


@pytest.fixture
def images_named_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolates the name that flytekit keeps for an image: tests run with and without a registry."""
    monkeypatch.setattr(ImageBuildEngine, "_IMAGE_NAME_TO_REAL_NAME", {})
    ImageBuildEngine.build.cache_clear()
    yield
    ImageBuildEngine.build.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("images_named_anew")
def test_checks_without_an_end_are_aborted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_REGISTRY", "registry.invalid/team")
    (tmp_path / "pods.yaml").write_text(f"job: {{labels: {{{QUEUE_LABEL}: training}}}}")
    monkeypatch.setattr(site_pods, "FILE", tmp_path / "pods.yaml")
    # On a slow machine flytekit prints to stdout how long it took to compress the code.
    monkeypatch.setattr(fast_registration.shutil, "which", lambda _program: None)
    clock = SimpleNamespace(time=itertools.count(step=60).__next__)
    monkeypatch.setattr(fast_registration, "time", clock)
    with Backend(tmp_path / "flyte", machine=NoRoom(), at_once=True) as backend:
        where = ["--flyte-config", str(backend.config), "--project", "flytesnacks"]
        arguments = ["cluster-check", *where, "--timeout", "3", "--json", "shape=one_gpu"]
        result = CliRunner().invoke(cli.group, arguments)
        assert backend.executions, f"{result.output}{result.exception!r}"
        (execution,) = backend.executions.values()
        execution_ended = backend._aborted[execution.name].is_set()
    assert result.exit_code == 1, result.output
    assert "tarball compression took 60 seconds" in result.stderr
    result_json = json.loads(result.stdout)
    assert result_json["counts"] == {"ok": 0, "warn": 0, "fail": len(NODES)}
    assert [line["name"] for line in result_json["checks"]] == [
        node.name for node in NODES.values()
    ]
    for line in result_json["checks"]:
        assert line["found"].startswith("did not end within 3 s")
        assert "kubectl describe" in line["fix"]
        waits_for_kueue = line["name"] in ("ray", "ray: engines")
        assert ("kubectl describe workloads" in line["fix"]) == waits_for_kueue
    assert execution_ended
    (ray,) = [s.template for (name, _), s in backend.tasks.items() if name.endswith(".try_ray")]
    (carried,) = [entry.value for entry in ray.container.env if entry.key == "_F_SS_C"]
    monkeypatch.delenv("NEMO_RL_REGISTRY")  # as in the container of a dynamic task
    _assert_gpu_images_are_registered(SerializationSettings.from_transport(carried))


class Aborting(NoRoom):
    """A machine on whose first pod somebody aborts the execution."""

    backend: Backend

    def start(self, *_: object) -> Container:
        for event in self.backend._aborted.values():
            event.set()
        return self


@pytest.mark.slow
def test_an_aborted_execution_is_not_waited_for(tmp_path: Path) -> None:
    machine = Aborting()
    with Backend(tmp_path / "flyte", machine=machine, at_once=True) as backend:
        machine.backend = backend
        options = ["--flyte-config", str(backend.config), "--project", "flytesnacks"]
        result = CliRunner().invoke(cli.group, ["cluster-check", *options, "--timeout", "300"])
    assert result.exit_code == 1, result.output
    assert f"0 ok, 0 warn, {len(NODES) - 1} fail" in result.output  # the file was never written


def _assert_gpu_images_are_registered(settings: SerializationSettings) -> None:
    """Names of the RayJobs that the dynamic tasks make there."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    context = context.with_execution_state(state).with_serialization_settings(settings)
    cluster = ClusterConfig(shape="one_gpu")
    for dynamic, image in ((try_ray, "training"), (try_engines, "generation")):
        with FlyteContextManager.with_context(context) as inner:
            spec = dynamic.compile_into_workflow(inner, dynamic.task_function, cluster=cluster)
        (task,) = spec.tasks
        template = task.to_flyte_idl()
        assert template.container.image.startswith(f"registry.invalid/team/nemo-rl-{image}:")
        assert list(problems(ray_job(template), schema("kuberay")["RayJob"])) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["shape=one_gup"], "one_gup"),
        (["shapes=one_gpu"], "shapes"),
        (["one_gpu"], "'one_gpu' is not a setting"),
    ],
)
def test_an_unknown_shape_is_refused(settings: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.group, ["cluster-check", *settings])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    config = tmp_path / "flyte.yaml"
    config.write_text("admin:\n  endpoint: dns:///127.0.0.1:9\n  insecure: true\n")
    result = CliRunner().invoke(cli.group, ["cluster-check", "--flyte-config", str(config)])
    assert result.exit_code == 2
    assert "the checks cannot be launched on 127.0.0.1:9" in result.output
    assert "fix: look at endpoint" in result.output
