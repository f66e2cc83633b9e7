"""The full pipeline with the real command: complete, cached, changed, killed and resumed.

`Run` has the output and the store of a run. The nightly tests kill another run in its second
iteration and resume it.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import NUM_STEPS, SAVE_EVERY, Run

pytestmark = pytest.mark.slow

EARLY_STAGES = ["prepare_model", "prepare_data", "train_sft", "evaluate"]
STAGES = [
    *EARLY_STAGES,
    "grpo_iteration 1",
    "grpo_iteration 2",
    "evaluate",
    "promote",
    "export",
    "lineage_report",
]


def test_a_run_ends_with_a_table_and_next_commands(first_run: Run) -> None:
    assert first_run.stages("ran") == STAGES
    assert "Traceback" not in first_run.output
    rows = [line.split("│")[1].strip() for line in first_run.lines if line.startswith("│")]
    assert rows == [*STAGES, "total"]
    # The line of the first step, with its reward and speed.
    assert re.search(r"grpo_iteration 1 1/12  reward \d\.\d{3}  [\d,]+ tokens/s", first_run.output)
    measured = re.findall(r"accuracy of (.+): \d\.\d{3} \[", first_run.output)
    assert measured == ["train_sft", "grpo_iteration 2"]
    decision = json.loads((first_run.artifact("promote") / "decision.json").read_text())
    verdicts = {True: "promoted: ", False: "NOT promoted: "}
    assert first_run.value(verdicts[decision["promoted"]])
    model = Path(first_run.value("model:"))
    trained = first_run.artifact("grpo_iteration 2") / "model"
    weights = "model.safetensors"
    assert file_hashes(model)[weights] == file_hashes(trained)[weights]
    assert first_run.value("exported:") == "the trained model (grpo_iteration 2)"
    assert first_run.value("chat:").endswith(f"nemo-rl chat {model.parent.name}")
    assert Path(first_run.value("lineage:")).is_file()
    assert Path(first_run.value("log:")).is_file()


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_libraries_do_not_write_over_the_display(first_run: Run) -> None:
    for word in ("INFO", "WARNING", "vLLM", "raylet", "(pid="):
        assert word not in first_run.output


def test_artifacts_record_their_lineage(first_run: Run) -> None:
    model = Path(first_run.value("model:")).parent
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest["stage"] == "export"
    lineage = Path(first_run.value("lineage:")).with_name("lineage.json")
    stages = {row["stage"] for row in json.loads(lineage.read_text())}
    # Promoted or not, the model comes from the evaluations of both candidates.
    assert {"prepare_model", "prepare_data train", "train_sft", "grpo_iteration 2"} <= stages


def test_metrics_of_every_step_are_kept(first_run: Run) -> None:
    for iteration in (1, 2):
        metrics = first_run.metrics(f"grpo_iteration {iteration}")
        first = (iteration - 1) * NUM_STEPS + 1
        steps = [line["global_step"] for line in metrics]
        assert steps == list(range(first, first + NUM_STEPS))
        for line in metrics:
            assert 1 <= line["token_mult_prob_error"] < 1.001
            assert 0 <= line["reward"] <= 1
            # Rollouts have at most 3 tokens, and a step has 16 of them.
            assert 1 <= line["completion_length"] <= 3
            assert line["num_valid_tokens"] == line["completion_length"] * 16
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    tables = page.partition("## Rewards and completions\n")[2].partition("## Other algorithms")[0]
    listed = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\|([^|]+)\|", tables))))
    optional = {"num_turns", "importance_weight", "importance_cut_fraction"}
    timed = {name for name in metrics[-1] if name.endswith(("_seconds", "_per_second"))}
    assert listed - optional == metrics[-1].keys() - timed - {"global_step"}


def test_the_same_command_again_runs_nothing(
    first_run: Run, run_recipe: Callable[..., Run], recipe: dict[str, Any]
) -> None:
    before = file_hashes(first_run.store / "artifacts")
    again = run_recipe(recipe, first_run.store)
    assert again.exit_code == 0, again.output[-3000:]
    assert again.stages("CACHED") == STAGES
    assert again.stages("ran") == []
    assert again.value("model:") == first_run.value("model:")
    assert file_hashes(first_run.store / "artifacts") == before


def test_another_learning_rate_keeps_earlier_stages(
    first_run: Run, run_until: Callable[..., Run], recipe: dict[str, Any]
) -> None:
    changed = {**recipe, "grpo": {**recipe["grpo"], "learning_rate": 1.25e-4}}
    # It is stopped before it trains; the first run shows that it can.
    stopped = run_until(changed, first_run.store, "grpo_iteration 1  ")
    assert stopped.lines[-1] == "grpo_iteration 1  started"
    assert stopped.stages("CACHED") == EARLY_STAGES
    assert stopped.stages("ran") == []
    for left in first_run.store.glob("work/grpo_iteration-*/"):
        shutil.rmtree(left)


@pytest.mark.thorough
def test_two_runs_from_empty_stores_are_bitwise_identical(first_run: Run, resumed_run: Run) -> None:
    for stage in ("train_sft", "grpo_iteration 1", "grpo_iteration 2"):
        one, other = (each.artifact(stage) for each in (first_run, resumed_run))
        for part in ("model", "trainer"):
            assert file_hashes(one / part) == file_hashes(other / part), (stage, part)
        assert first_run.metrics(stage) == resumed_run.metrics(stage), stage
    names = {path.name for path in (first_run.store / "artifacts").iterdir()}
    assert {path.name for path in (resumed_run.store / "artifacts").iterdir()} == names
    for name in names:
        one, other = (each.store / "artifacts" / name for each in (first_run, resumed_run))
        assert lasting_hashes(one) == lasting_hashes(other), name
    assert file_hashes(Path(first_run.value("model:"))) == file_hashes(
        Path(resumed_run.value("model:"))
    )


def lasting_hashes(artifact: Path) -> dict[str, str]:
    """Returns hashes of all files except those with times, durations and costs."""
    left_out = {"manifest.json", "ancestors.json", "deck.html"}
    if (artifact / "trainer").is_dir():  # the seconds of each step, and the peak of memory
        left_out |= {"metrics.jsonl", "finished.json"}
    hashes = file_hashes(artifact)
    assert left_out <= hashes.keys()
    return {name: digest for name, digest in hashes.items() if name not in left_out}


def test_training_changed_the_weights(first_run: Run) -> None:
    weights = {
        file_hashes(first_run.artifact(stage) / "model")["model.safetensors"]
        for stage in ("prepare_model", "train_sft", "grpo_iteration 1", "grpo_iteration 2")
    }
    assert len(weights) == 4


def test_a_killed_run_keeps_its_stages_and_resumes_from_its_save(
    first_run: Run,
    kill_after_save: Callable[..., None],
    run_recipe: Callable[..., Run],
    recipe: dict[str, Any],
) -> None:
    artifacts = set((first_run.store / "artifacts").iterdir())
    changed = {
        **recipe,
        "sft": {**recipe["sft"], "num_steps": 3},
        "grpo": {**recipe["grpo"], "num_iterations": 1},
    }
    kill_after_save(changed, first_run.store, step=2 * SAVE_EVERY)
    resumed = run_recipe(changed, first_run.store)
    assert resumed.exit_code == 0, resumed.output[-3000:]
    assert resumed.stages("CACHED") == EARLY_STAGES
    late_stages = ["grpo_iteration 1", "evaluate", "promote", "export", "lineage_report"]
    assert resumed.stages("ran") == late_stages
    steps = [
        int(match.group(1))
        for line in resumed.lines
        if (match := re.match(r"grpo_iteration 1 (\d+)/12", line))
    ]
    assert steps == list(range(2 * SAVE_EVERY + 1, NUM_STEPS + 1))
    assert [path.name for path in (resumed.store / "work").iterdir() if path.is_dir()] == []
    for added in set((first_run.store / "artifacts").iterdir()) - artifacts:
        shutil.rmtree(added)  # other tests expect one artifact of each stage
