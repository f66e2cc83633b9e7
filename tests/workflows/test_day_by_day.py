"""Scheduled runs over rows in an object store train only if there are new rows."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core import tasks_pb2
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import Config
from flytekit.models.common import NamedEntityIdentifier
from flytekit.models.execution import ExecutionMetadata, ExecutionSpec
from flytekit.models.literals import LiteralMap

from tests.commands import REPOSITORY
from tests.notice_servers import hook
from tests.workflows.flyte_backend import Backend, ExecutionRecord
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.flyte_backend.containers import ProcessContainer, Processes

pytestmark = pytest.mark.thorough

RECIPE: dict[str, Any] = {
    "model": {
        "kind": "from_config", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
        "num_heads": 2,
    },
    "data": {
        "kind": "file",
        "train": "s3://flyte-data/rows/*.jsonl",
        "validation": "s3://flyte-data/held_out.jsonl",
        "max_prompt_tokens": 8,
    },
    "sft": {"num_steps": 2, "global_batch_size": 4},
    "generation": {"backend": "hf", "max_new_tokens": 3},
    "evaluation": {"num_samples_per_prompt": 0},
    "cluster": {"num_threads": 1},
}  # fmt: skip


def rows(first: int, last: int) -> bytes:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(first, last)]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def test_a_nightly_run_reports_whether_there_are_new_rows(tmp_path: Path) -> None:
    recipe = tmp_path / "nightly.yaml"
    recipe.write_text(json.dumps(RECIPE))
    with S3Bucket("127.0.0.1") as bucket, hook() as (address, posted):
        bucket.write("rows/monday.jsonl", rows(0, 8))
        bucket.write("held_out.jsonl", rows(40, 44))

        def night() -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [Path(sys.executable).with_name("nemo-rl"), "run", "sft", recipe],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "NEMO_RL_HOME": str(tmp_path / "store"),
                    "NEMO_RL_NOTIFY": address,
                    "AWS_ENDPOINT_URL": bucket.environment["FLYTE_AWS_ENDPOINT"],
                    "AWS_ACCESS_KEY_ID": "a-key",
                    "AWS_SECRET_ACCESS_KEY": "its-secret",
                    "AWS_DEFAULT_REGION": "us-east-1",
                },
                capture_output=True,
                text=True,
                check=False,
                timeout=500,
            )

        first = night()
        assert first.returncode == 0, (first.stdout + first.stderr)[-3000:]
        assert " succeeded\n" in posted[-1]["text"]
        assert "accuracy of" in posted[-1]["text"]

        second = night()
        assert "nothing new: every stage was cached" in second.stdout + second.stderr
        assert " ended\nnothing new" in posted[-1]["text"]

        bucket.write("rows/tuesday.jsonl", rows(8, 16))
        third = night()
        assert third.returncode == 0, (third.stdout + third.stderr)[-3000:]
        assert " succeeded\n" in posted[-1]["text"]
        made = (tmp_path / "store" / "artifacts").glob("prepare_data-*/summary.txt")
        summaries = sorted(path.read_text() for path in made)
        assert summaries == ["train 16 rows", "train 8 rows", *2 * ["validation 4 rows"]]

        # Errors before the start are shown only to the user who started the run.
        for path in bucket.list("rows/"):
            bucket.remove(path)
        fourth = night()
        assert fourth.returncode == 2
        assert "there is no data under s3://flyte-data/rows/*.jsonl" in fourth.stderr
    assert len(posted) == 3
    assert "its-secret" not in json.dumps(posted)


def nemo_rl(*arguments: object, program: str = "nemo-rl") -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


class WithRows(Processes):
    """Starts containers that can read the bucket with the rows."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> ProcessContainer:
        return super().start(task, command, pod, environment | self._bucket.environment)


def scheduled_run(backend: Backend, name: str) -> ExecutionRecord:
    """Starts the active launch plan, as Flyte's scheduler does, and waits for its success."""
    client = SynchronousFlyteClient(Config.auto(str(backend.config)).platform)
    project, domain = "flytesnacks", "development"
    plan = client.get_active_launch_plan(NamedEntityIdentifier(project, domain, "mine"))
    mode = ExecutionMetadata.ExecutionMode.SCHEDULED
    spec = ExecutionSpec(plan.id, ExecutionMetadata(mode, "scheduler", 0))
    client.create_execution(project, domain, name, spec, LiteralMap({}))
    record = backend.executions[name]
    deadline = time.monotonic() + 1500
    while record.phase == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert record.phase == "SUCCEEDED", record.error
    return record


def stages_run(record: ExecutionRecord) -> set[str]:
    """Returns names of the stages that ran, without cache hits of Flyte."""
    ran = {node.entity for node in record.nodes.values() if node.attempts and not node.cached}
    return {name.rpartition(".")[2] for name in ran if name.startswith("tasks.")}


def test_a_schedule_on_a_cluster_trains_once_for_each_listing(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps(RECIPE))
    with S3Bucket("127.0.0.1") as bucket:
        for path in bucket.list(""):  # moto's servers in one process share their buckets
            bucket.remove(path)
        bucket.write("rows/monday.jsonl", rows(0, 8))
        bucket.write("held_out.jsonl", rows(40, 44))
        with Backend(tmp_path / "flyte", machine=WithRows(bucket)) as backend:
            config = ["--config", backend.config]
            project = ["--project", "flytesnacks", "--domain", "development"]
            nemo_rl(*config, "register", *project, "--version", "v1", "--copy", "all",
                    # Into the container's working directory; the default is this machine's /root.
                    "--destination-dir", ".", "workflows/sft.py", program="pyflyte")  # fmt: skip
            shown = nemo_rl("schedule", recipe, "*/10 * * * *", "--workflow", "sft", "--activate",
                            "--flyte-config", backend.config, *project)  # fmt: skip
            assert "schedule: mine, workflows.sft.sft of version v1" in shown

            assert {"prepare_data", "train_sft"} <= stages_run(scheduled_run(backend, "first"))
            # The same listing: only the plan runs again, and the run reports "nothing new".
            assert stages_run(scheduled_run(backend, "second")) == {"plan_sft", "announce"}
            bucket.write("rows/tuesday.jsonl", rows(8, 16))
            assert {"prepare_data", "train_sft"} <= stages_run(scheduled_run(backend, "third"))
