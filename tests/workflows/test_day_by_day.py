"""A run that is started every night: rows in an object store, and a webhook that is told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY
from tests.notice_servers import hook
from tests.workflows.flyte_backend.buckets import S3Bucket

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
