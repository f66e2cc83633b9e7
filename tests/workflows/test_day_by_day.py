"""Runs that nobody starts by hand: every night, and on rows that arrive in an object store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY
from tests.notice_servers import hook
from tests.workflows.flyte_backend import Backend, ExecutionRecord
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.test_arrivals import WithRows, said, start_look

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
    found = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(first, last)]
    return "".join(f"{json.dumps(row)}\n" for row in found).encode()


def test_a_nightly_run_sees_new_rows_and_says_when_there_are_none(tmp_path: Path) -> None:
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

        # What is wrong before the start is said to who started it.
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


def test_rows_that_arrive_on_a_cluster_start_one_run_each(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps(RECIPE))
    with S3Bucket("127.0.0.1") as bucket:
        for path in bucket.list(""):  # moto's servers in one process share their buckets
            bucket.remove(path)
        bucket.write("rows/monday.jsonl", rows(0, 8))
        bucket.write("held_out.jsonl", rows(40, 44))
        machine = WithRows(bucket)
        with Backend(tmp_path / "flyte", machine=machine) as backend:
            machine.backend = backend
            where = ["--config", backend.config]
            project = ["--project", "flytesnacks", "--domain", "development"]
            nemo_rl(*where, "register", *project, "--version", "v1", "--copy", "all",
                    # Into the container's own folder: by default it is /root, this machine's.
                    "--destination-dir", ".", "workflows/arrivals.py", "workflows/sft.py",
                    program="pyflyte")  # fmt: skip
            shown = nemo_rl("schedule", recipe, "*/10 * * * *", "--on-arrival", "--settled", 0,
                            "--workflow", "sft", "--activate", *where, *project)  # fmt: skip
            assert "schedule: mine, workflows.sft.sft of version v1" in shown

            def ended(name: str) -> ExecutionRecord:
                record = backend.executions[name]
                deadline = time.monotonic() + 1500
                while record.phase == "RUNNING" and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert record.phase == "SUCCEEDED", record.error
                return record

            def looked(name: str) -> ExecutionRecord:
                start_look(backend, name)
                return ended(name)

            first = looked("look-1")
            attempts = [each for node in first.nodes.values() for each in node.attempts]
            assert [each.exit_code for each in attempts] == [-signal.SIGKILL, 0]
            assert machine.num_killed == 1
            (name,) = backend.executions.keys() - {"look-1"}
            assert f"nothing new: {name} runs on these rows" in said(first)
            ended(name)
            assert f"nothing new: {name} has run on these rows" in said(looked("look-2"))

            bucket.write("rows/tuesday.jsonl", rows(8, 16))
            third = said(looked("look-3"))
            (other,) = backend.executions.keys() - {"look-1", "look-2", "look-3", name}
            assert third.startswith(f"new rows: {other} was started (2 objects")
            trained = ended(other)
            summaries = [
                node.entity
                for node in trained.nodes.values()
                if node.attempts and not node.cached and "prepare_data" in node.entity
            ]
            assert len(summaries) == 1, "the rows are read anew"
