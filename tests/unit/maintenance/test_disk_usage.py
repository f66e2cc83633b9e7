"""Disk usage is compared with `du`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from nemo_rl_core.maintenance.disk import allocated
from nemo_rl_core.maintenance.disk_usage import measure_disk
from tasks.cli.store.usage import usage

Small = Any


def _du(path: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_every_breakdown_sums_to_du(small: Small, lineage: dict[str, str]) -> None:
    artifacts = small.store.artifacts
    first, second, third = (artifacts / lineage[name] for name in ("first", "second", "third"))
    # A second name, a sparse file, a link out of the store, and a broken one.
    os.link(first / "rows", third / "rows again")
    with (second / "sparse").open("wb") as file:
        file.truncate(50 * 2**20)
    (second / "link").symlink_to("/usr")
    (second / "dangling").symlink_to("nowhere")
    usage = measure_disk(small.store)
    total = _du(small.store.root)
    assert usage.num_bytes == total
    assert total < 2 * 2**20, "the sparse file counts by its blocks"
    assert sum(area.num_bytes for area in usage.areas) == total
    area = next(area for area in usage.areas if area.name == "artifacts")
    assert area.num_bytes == _du(artifacts)
    for cut in (usage.stages, usage.kinds):
        assert sum(share.num_bytes for share in cut) == _du(artifacts)
    counts = {share.name: share.count for share in usage.stages}
    assert counts == {"train_sft": 2, "grpo_iteration": 1, "prepare_data": 1, ".": 1}


def test_bytes_that_runs_need_and_bytes_of_only_one_run(
    small: Small, lineage: dict[str, str]
) -> None:
    size = {name: _du(small.store.artifacts / folder) for name, folder in lineage.items()}
    folder_bytes = {run: _du(small.store.runs / run) for run in ("run1", "run2", "run3")}
    newest, middle, oldest = measure_disk(small.store).runs
    assert (newest.name, middle.name, oldest.name) == ("run3", "run2", "run1")
    assert newest.num_bytes == folder_bytes["run3"] + size["third"] + size["second"] + size["data"]
    assert newest.only_bytes == folder_bytes["run3"] + size["third"]
    assert middle.num_bytes == folder_bytes["run2"] + size["second"] + size["data"]
    assert middle.only_bytes == folder_bytes["run2"]
    assert oldest.only_bytes == folder_bytes["run1"] + size["first"]


def test_a_missing_store_uses_no_bytes(tmp_path: Path) -> None:
    assert allocated(tmp_path / "none") == 0


def test_the_command(small: Small, lineage: dict[str, str]) -> None:
    output = json.loads(CliRunner().invoke(usage, ["--json"]).output)
    assert output["num_bytes"] == _du(small.store.root)
    assert {share["name"] for share in output["kinds"]} == {"checkpoint", "."}
    shown = CliRunner().invoke(usage).output
    assert str(small.store.root) in shown
    for word in ("artifacts by stage", "train_sft", "run3", "needs", "alone"):
        assert word in shown
