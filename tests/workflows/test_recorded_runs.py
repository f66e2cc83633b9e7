"""Records of real runs in the store's database: a first run, its cached rerun, a killed run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store

pytestmark = pytest.mark.thorough

STAGES = {
    "prepare_model",
    "prepare_data",
    "train_sft",
    "evaluate",
    "grpo_iteration 1",
    "grpo_iteration 2",
    "promote",
    "export",
    "lineage_report",
}
EDGES = {
    ("plan_grpo", "data", "begin", "data"),
    ("prepare_model", "tokenizer", "prepare_data", "tokenizer"),
    ("prepare_data", "validation", "choose_questions", "validation"),
    ("prepare_data", "train", "train_sft", "train"),
    ("train_sft", "o0", "grpo_iteration 1", "start"),
    ("train_sft", "o0", "grpo_iteration 2", "reference"),
    ("grpo_iteration 1", "o0", "grpo_iteration 2", "start"),
    ("grpo_iteration 2", "o0", "as_transformers", "checkpoint"),
    ("as_transformers", "o0", "promote", "candidate"),
    ("export", "o0", "lineage_report", "model"),
}


def edges_of(history: History, execution: str) -> set[tuple[str, str, str, str]]:
    names = {node.id: node.name for node in history.nodes(execution)}
    return {
        (names[each.source], each.source_output, names[each.target], each.target_input)
        for each in history.edges(execution)
    }


def nemo_rl(store: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs the user's command."""
    return subprocess.run(
        [sys.executable, "-c", "from workflows.cli import main; main()", *words],
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def test_a_run_and_its_cached_rerun(
    first_run: Any, recipe: dict[str, Any], run_recipe: Callable[..., Any]
) -> None:
    again = run_recipe(recipe, first_run.store)
    assert again.exit_code == 0, again.output[-3000:]
    with History(Store(first_run.store)) as history:
        page = history.executions()
        first, rerun = page.items[-1], page.items[0]
        assert (first.state, rerun.state) == ("succeeded", "succeeded")
        assert edges_of(history, first.id) >= EDGES
        assert edges_of(history, first.id) == edges_of(history, rerun.id)
        before = [node for node in history.nodes(first.id) if node.name in STAGES]
        after = [node for node in history.nodes(rerun.id) if node.name in STAGES]
        assert len(before) == len(after) == 10  # evaluate runs twice
        assert {node.state for node in before} == {"succeeded"}
        assert {node.state for node in after} == {"cached"}
        assert [node.cached_from for node in after] == [node.id for node in before]
        trained = next(node for node in after if node.name == "grpo_iteration 2")
        steps = [step for step, _ in history.metrics(trained.id)["reward"]]
        assert steps == list(range(13, 25))
        exported = next(node for node in before if node.name == "export")
        artifact = history.artifact(history.node(exported.id).outputs[0].artifact or "")
        stages = {
            each.artifact.stage for each in history.ancestry(artifact.id).artifacts if each.artifact
        }
        assert {"prepare_data train", "prepare_model", "train_sft", "grpo_iteration 2"} <= stages
    card = (Path(artifact.path) / "model" / "README.md").read_text()
    assert "library_name: transformers" in card and "this model" in card
    shown = nemo_rl(first_run.store, "lineage", str(Path(artifact.path) / "model"))
    assert "train_sft" in shown.stdout and "prepare_data train" in shown.stdout


def test_a_killed_run_is_aborted_and_the_next_one_resumed(
    killed_run: Path, resumed_run: Any
) -> None:
    assert resumed_run.exit_code == 0
    with History(Store(killed_run)) as history:
        resumed, killed = history.executions().items
        assert (killed.state, resumed.state) == ("aborted", "succeeded")
        (broken,) = [n for n in history.nodes(killed.id) if n.name == "grpo_iteration 2"]
        assert broken.state == "aborted"
        (finished,) = [n for n in history.nodes(resumed.id) if n.name == "grpo_iteration 2"]
        (attempt,) = history.node(finished.id).attempts
        assert attempt.resumed_from_step == 20  # of the 24 of both iterations
        done = [step for step, _ in history.metrics(broken.id)["reward"]]
        assert done[0] == 13 and done[-1] >= 20
        again = [step for step, _ in history.metrics(finished.id)["reward"]]
        assert again == list(range(21, 25))


def test_a_reproduced_checkpoint_is_bitwise_identical(
    recipe: dict[str, Any], run_recipe: Callable[..., Any], tmp_path: Path
) -> None:
    small = {key: value for key, value in recipe.items() if key != "grpo"}
    made = run_recipe(small, tmp_path / "store", ("sft", "sft"))
    assert made.exit_code == 0, made.output[-3000:]
    trained = made.artifact("train_sft")
    reproduced = nemo_rl(
        tmp_path / "store", "reproduce", trained.name, "--store", str(tmp_path / "new")
    )
    assert reproduced.returncode == 0, reproduced.stdout[-2000:] + reproduced.stderr[-2000:]
    assert f"bitwise identical: {trained.name}" in reproduced.stdout
    assert "tensors of weights" in reproduced.stdout
    # The new store has it and its ancestors, but no later stage.
    made_again = {
        json.loads(path.read_text())["stage"]
        for path in (tmp_path / "new/artifacts").glob("*/manifest.json")
    }
    assert made_again >= {"prepare_model", "tokenizer", "prepare_data train", "train_sft"}
    assert not any(stage.startswith(("evaluate", "export", "promote")) for stage in made_again)


def test_two_concurrent_runs_are_both_complete(
    recipe: dict[str, Any], run_recipe: Callable[..., Any], tmp_path: Path
) -> None:
    small = {key: value for key, value in recipe.items() if key != "grpo"}
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_recipe(small, tmp_path, ("sft", "sft")), range(2)))
    assert [each.exit_code for each in both] == [0, 0], both[0].output[-2000:]
    with History(Store(tmp_path)) as history:
        one, two = history.executions().items
        assert {one.state, two.state} == {"succeeded"}
        assert edges_of(history, one.id) == edges_of(history, two.id)
        assert len(history.nodes(one.id)) == len(history.nodes(two.id))
