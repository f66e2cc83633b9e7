"""Exit code, output and bitwise identical results of a run that a scheduler stops."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from tests.commands import RECIPE, Run, end_group, run, start

SFT = ("sft", "sft")
SMALL: dict[str, Any] = {
    **{key: value for key, value in RECIPE.items() if key != "grpo"},
    "sft": {"num_steps": 40, "global_batch_size": 16, "save_every_num_steps": 2},
}


def stop(store: Path, *, when: str) -> Run:
    """Sends SIGTERM once a line starts with `when`."""
    process = start(SMALL, store, SFT)
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line.startswith(when):
                os.kill(process.pid, signal.SIGTERM)
        exit_code = process.wait()
    finally:
        end_group(process)
    return Run(store, exit_code, "".join(seen), 0.0)


@pytest.mark.thorough
def test_a_stopped_run_resumes_with_bitwise_identical_results(tmp_path: Path) -> None:
    stopped = stop(tmp_path / "store", when="sft 5/40")
    assert stopped.exit_code == 143, stopped.output
    report = [
        line for line in stopped.lines if line.startswith(("stopped from", "  saved", "  go"))
    ]
    assert re.match(
        r"stopped from outside \(SIGTERM\) at step \d+ of 40 of train_sft, after", report[0]
    )
    (saved,) = re.findall(
        r"  saved: step (\d+) of train_sft, and the 3 stages before it", report[1]
    )
    assert "pyflyte run workflows/sft.py sft --config" in report[2]
    assert stopped.stages("STOPPED") == ["train_sft"]
    resumed, uninterrupted = (run(SMALL, tmp_path / name, SFT) for name in ("store", "other"))
    assert (resumed.exit_code, uninterrupted.exit_code) == (0, 0), resumed.output[-2000:]
    assert f"sft {int(saved) + 1}/40" in resumed.output and "sft 1/40" not in resumed.output
    trained = [Manifest.read(each.artifact("train_sft")) for each in (resumed, uninterrupted)]
    assert trained[0].weights_hash == trained[1].weights_hash
    assert trained[0].content_hash == trained[1].content_hash
    assert resumed.metrics("train_sft") == uninterrupted.metrics("train_sft")
    assert resumed.lines[-1].startswith("run: "), "no repr of what the workflow returns"
    with History(Store(tmp_path / "store")) as history:
        last, first = history.executions().items
        assert (first.state, last.state) == ("stopped", "succeeded")
        assert first.error.splitlines() == report
        (cut,) = [node for node in history.nodes(first.id) if node.name == "train_sft"]
        assert cut.cost["wall_seconds"] > 0 and cut.cost["trained_tokens"] > 0
        (made,) = [node for node in history.nodes(last.id) if node.name == "train_sft"]
        assert history.node(made.id).attempts[-1].resumed_from_step == int(saved)
