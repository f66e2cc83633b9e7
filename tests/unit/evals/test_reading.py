"""Evaluations saved, read back, and printed by `nemo-rl eval`."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.evaluate import eval_rows
from nemo_rl_core.evals.rows import (
    compare_files,
    compare_rows,
    greedy_outcomes,
    load_eval_rows,
    save_eval_rows,
)
from nemo_rl_core.types import Completion, Prompt, Rollout
from workflows.cli import group


def texts(rollouts: Sequence[Rollout]) -> list[str]:
    return [rollout.text.strip() for rollout in rollouts]


def read(*arguments: object) -> Result:
    return CliRunner().invoke(group, ["eval", *map(str, arguments)])


def rollout(index: int, text: str, reward: float | None) -> Rollout:
    prompt = Prompt(f"row-{index}", f"{index}+1=", (1,), str(index + 1), "sums")
    error = "no answer\nfrom the judge" if reward is None else None
    return Rollout(prompt, Completion((1,), (0.0,), truncated=False), text, reward, error=error)


def saved(folder: Path, rollouts: list[Rollout]) -> Path:
    folder.mkdir()
    rows = [
        row
        for mode, drawn in (("greedy", rollouts), ("sampled", [rollouts[0], rollouts[0]]))
        for row in eval_rows(
            drawn, mode, category="task", get_votes=texts, environment=ExactMatch()
        )
    ]
    save_eval_rows(rows, folder / "rows.parquet")
    assert load_eval_rows(folder / "rows.parquet") == rows
    return folder


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    hostile = "2\x1b[2J\u202e\nnext"
    return saved(
        tmp_path / "first", [rollout(0, "1 ", 1.0), rollout(1, hostile, 0.0), rollout(2, "?", None)]
    )


def test_missing_rewards_are_none_again(evaluation: Path) -> None:
    rows = load_eval_rows(evaluation / "rows.parquet")
    assert greedy_outcomes(rows) == {"row-0": True, "row-1": False, "row-2": None}
    assert [row["sample"] for row in rows if row["mode"] == "sampled"] == [0, 1]
    assert rows[0]["extracted"] == "1"


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    one, two = (saved(tmp_path / name, [rollout(0, "1", 1.0)]) for name in "ab")
    assert (one / "rows.parquet").read_bytes() == (two / "rows.parquet").read_bytes()


def test_control_characters_of_completions_are_escaped(evaluation: Path) -> None:
    result = read(evaluation, "--only", "wrong")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "prompt row-1",
        "asked: 1+1=",
        "completion: 2\\x1b[2J\\u202e",
        "  next",
        "wrong: answer 2, reward 0.0",
        "",
        "1 of 1 greedy completions that are wrong",
    ]
    result = read(evaluation / "rows.parquet", "--only", "unscored")
    assert result.exit_code == 0
    assert "error: no answer\n  from the judge" in result.stdout
    result = read(evaluation, "--mode", "sampled", "-n", "1")
    assert result.exit_code == 0
    assert result.stdout.endswith("1 of 2 sampled completions\n")


def test_changes_between_two_evaluations_are_listed(evaluation: Path, tmp_path: Path) -> None:
    after = saved(
        tmp_path / "after", [rollout(0, "7", 0.0), rollout(1, "2", 1.0), rollout(2, "3", 1.0)]
    )
    result = read(evaluation, after)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "prompt row-0: lost"
    assert "prompt row-1: gained" in lines
    assert "2 of 2 prompts that changed" in lines
    # One gained, one lost, one not scored before.
    assert lines[-1].startswith("no difference shown at 95 % confidence: +0.0 points")


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    result = read(tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no evaluation in" in result.stderr
    pd.DataFrame([{"prompt": "1+1="}]).to_parquet(tmp_path / "rows.parquet")
    result = read(tmp_path)
    assert result.exit_code == 2
    assert "prompt_id is missing from every row" in result.stderr


def test_a_verdict_or_number_that_does_not_exist_is_refused(evaluation: Path) -> None:
    assert read(evaluation, "--only", "righ").exit_code == 2
    assert read(evaluation, "-n", "-1").exit_code == 2


def test_pairs_are_compared_by_whether_the_chosen_completion_scores_higher(tmp_path: Path) -> None:
    pairs = pd.DataFrame(
        {
            "id": ["a", "b", "c"],
            "chosen": ["yes"] * 3,
            "rejected": ["no"] * 3,
            "chosen_score": [1.0, -2.0, 0.5],
            "rejected_score": [0.5, -1.0, 0.5],
        }
    )
    file = tmp_path / "rows.parquet"
    pairs.to_parquet(file)
    compared = compare_files(file, file, confidence=0.95)
    assert (compared.before, compared.num_prompts) == (1 / 3, 3)
    pairs.assign(chosen_score=float("nan")).to_parquet(file)
    with pytest.raises(DataError, match=r"rows\.parquet"):
        compare_files(file, file, confidence=0.95)


def test_the_outcomes_of_questions_are_the_greedy_ones(evaluation: Path) -> None:
    file = evaluation / "rows.parquet"
    compared = compare_files(file, file, confidence=0.95)
    assert (compared.before, compared.num_prompts, compared.num_unscored) == (0.5, 2, 1)


def test_evaluations_by_different_versions_of_a_grader_are_not_compared(evaluation: Path) -> None:
    rows = load_eval_rows(evaluation / "rows.parquet")
    old = [{key: value for key, value in row.items() if key != "grader_version"} for row in rows]
    later = [{**row, "grader_version": 2} for row in rows]
    assert compare_rows(old, rows, confidence=0.95).num_prompts == 2
    assert compare_rows(later, later, confidence=0.95).num_prompts == 2
    with pytest.raises(DataError, match="scored 3 of 3 prompts") as caught:
        compare_rows(old, later, confidence=0.95)
    assert caught.value.got == "version 1 and version 2 for the prompt row-0"
