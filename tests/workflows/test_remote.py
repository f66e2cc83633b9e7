"""A user's commands on a cluster: register, launch, fail, resume.

The services and the execution of graphs are those of `flyte_backend`. The client, the shipped code,
the containers' commands, Ray, vLLM and the training are real.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from nemo_rl_core.history.ancestry import folder_ancestry
from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.store import Store
from tests.commands import RECIPE
from tests.workflows.flyte_backend import Attempt, Backend, ExecutionRecord

pytestmark = pytest.mark.thorough

REPOSITORY = Path(__file__).resolve().parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")
SMALL: dict[str, Any] = {
    **RECIPE,
    "grpo": {**RECIPE["grpo"], "num_iterations": 1, "save_every_num_steps": 2},
}


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Backend(tmp_path / "flyte") as started:
        yield started


def _start(backend: Backend, home: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [PYFLYTE, "--config", backend.config, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(home / "store"), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _launch(backend: Backend, home: Path) -> "subprocess.Popen[str]":
    # All code is shipped, since stages import most of it in their bodies.
    flags = ["--remote", "--wait", "--poll-interval", "1", "--copy", "all"]
    recipe = ["--config", json.dumps(SMALL)]
    return _start(backend, home, "run", *flags, "workflows/grpo.py", "grpo", *recipe)


def _wait_for(what: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        result = what()
        if result:
            return result
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)
    raise TimeoutError("the condition was not met in time")


def _output(execution: ExecutionRecord, name: str) -> dict[str, Any]:
    """Returns a record among the workflow's outputs."""
    record: dict[str, Any] = msgpack.loads(execution.outputs.literals[name].scalar.binary.value)
    return record


def _assert_folder_has_full_lineage(
    backend: Backend, execution: ExecutionRecord, local: Any, home: Path
) -> None:
    """Asserts that the downloaded model names the same ancestors as the local run's model."""
    bucket = Path(_output(execution, "model")["directory"]["path"])
    model = home / "downloaded" / "my model"
    shutil.copytree(bucket, model)
    # The ancestry must not be read from the bucket or the pods.
    aside = bucket.parents[3].rename(bucket.parents[3].with_name("aside"))
    try:
        graph = folder_ancestry(model)
        (imported,) = import_folders(Store(home / "laptop"), [model])
    finally:
        aside.rename(bucket.parents[3])
    with History(Store(local.store)) as history:
        same = history.ancestry(local.artifact("export").name)
    assert {each.id: each.content_hash for each in graph.artifacts} == {
        each.id: each.content_hash for each in same.artifacts
    }
    assert {(link.parent, link.child) for link in graph.parentage} == {
        (link.parent, link.child) for link in same.parentage
    }
    commit = git_state(REPOSITORY)
    for each in graph.artifacts:
        assert each.artifact is not None
        assert each.execution == execution.name == imported
        assert each.artifact.manifest["git_commit"] == commit.commit, each.id
    with History(Store(home / "laptop")) as history:
        (iteration,) = [n for n in history.nodes(imported) if n.task.endswith("grpo_iteration")]
        assert history.node(iteration.id).attempts[0].number == 2


def test_everything_can_be_registered_repeatedly(backend: Backend, tmp_path: Path) -> None:
    first = _start(backend, tmp_path, "register", "workflows")
    assert first.wait(300) == 0, first.communicate()[0]
    names = {name for name, _ in backend.workflows}
    modules = {
        path.stem
        for path in (REPOSITORY / "workflows").glob("*.py")
        if "@workflow" in path.read_text()
    }
    assert modules <= {name.split(".")[1] for name in names}
    assert names <= {spec.workflow_id.name for spec in backend.launch_plans.values()}
    counts = len(backend.tasks), len(backend.workflows), len(backend.launch_plans)

    again = _start(backend, tmp_path, "register", "workflows")
    assert again.wait(300) == 0, again.communicate()[0]
    assert counts == (len(backend.tasks), len(backend.workflows), len(backend.launch_plans))


def test_pyflyte_waits_for_its_launch(backend: Backend, tmp_path: Path) -> None:
    """`--wait` requests a listing of nodes; a tiny workflow suffices to test it."""
    lines = ["from flytekit import task, workflow", "@task", "def add(a: int) -> int: return a + 1"]
    lines += ["@workflow", "def sums(a: int = 1) -> int: return add(a=add(a=a))"]
    (tmp_path / "sums.py").write_text("\n".join(lines))
    flags = ["--remote", "--wait", "--poll-interval", "1", "--copy", "all"]
    command = [PYFLYTE, "--config", backend.config, "run", *flags, "sums.py", "sums", "--a", "3"]
    ran = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (execution,) = backend.executions.values()
    assert execution.outputs.literals["o0"].scalar.primitive.integer == 5
    assert len(execution.nodes) == 2


def test_nemo_rl_run_sends_all_code_and_the_recipe(backend: Backend, tmp_path: Path) -> None:
    project = ["--project", "flytesnacks", "--domain", "development"]
    options = ["--flyte-config", backend.config, *project]
    command = [PYFLYTE.with_name("nemo-rl"), "run", "sft", "seed=3", "--remote", *options]
    ran = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (execution,) = backend.executions.values()
    assert execution.launch_plan == "workflows.sft.sft"
    config = msgpack.loads(execution.inputs.literals["config"].scalar.binary.value)
    assert config["seed"] == 3
    (archive,) = (tmp_path / "flyte/blobs/uploads").rglob("*.tar.gz")
    with tarfile.open(archive) as opened:
        sent = set(opened.getnames())
    # These files are not reached by imports of the workflow.
    assert {"deployment/pods.yaml", "nemo_rl_core/algorithms/sft/trainer.py"} <= sent


def test_a_killed_container_resumes_from_its_checkpoint(
    backend: Backend, tmp_path: Path, run_recipe: Callable[..., Any]
) -> None:
    launched = _launch(backend, tmp_path)

    def first_attempt() -> Attempt | None:
        for execution in backend.executions.values():
            for node in execution.named("grpo_iteration"):
                return node.attempts[0] if node.attempts else None
        return None

    attempt = _wait_for(first_attempt, launched)
    _wait_for(lambda: any(Path(attempt.checkpoint).rglob("*")), launched)
    os.killpg(attempt.pid, signal.SIGKILL)
    output = launched.communicate(timeout=500)[0]
    (execution,) = backend.executions.values()
    assert launched.returncode == 0, output[-2000:] + execution.error
    (node,) = execution.named("grpo_iteration")
    assert [each.exit_code for each in node.attempts] == [-signal.SIGKILL, 0]

    # The same recipe on this machine, undisturbed, gives the same weights.
    local = run_recipe(SMALL, tmp_path / "local")
    assert local.exit_code == 0, local.output[-2000:]
    manifest = json.loads((local.artifact("export") / "manifest.json").read_text())
    assert _output(execution, "model")["content_hash"] == manifest["content_hash"]
    _assert_folder_has_full_lineage(backend, execution, local, tmp_path)

    # A second launch only finds cached stages.
    assert _launch(backend, tmp_path).wait(300) == 0
    second = list(backend.executions.values())[1]
    ran = {node.entity for node in second.nodes.values() if node.attempts}
    made = {name for name in ran if name.startswith("tasks.") and "plan_" not in name}
    assert made == {"tasks.announce.announce"}  # reports that there was nothing new
    assert _output(second, "model") == _output(execution, "model")
