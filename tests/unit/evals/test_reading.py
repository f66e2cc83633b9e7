"""Evaluations saved, read back, and printed by `python -m nemo_rl_core.evals`."""

from pathlib import Path

import pandas as pd
import pytest

from nemo_rl_core.evals.__main__ import main
from nemo_rl_core.evals.judged import rows_of
from nemo_rl_core.evals.rows import greedy_outcomes, load_rows, save_rows
from nemo_rl_core.types import Completion, Prompt, Rollout


def rollout(place: int, text: str, reward: float | None) -> Rollout:
    prompt = Prompt(f"row-{place}", f"{place}+1=", (1,), str(place + 1), "sums")
    error = "no answer\nfrom the judge" if reward is None else None
    return Rollout(prompt, Completion((1,), (0.0,), truncated=False), text, reward, error=error)


def saved(folder: Path, rollouts: list[Rollout]) -> Path:
    folder.mkdir()
    rows = [
        *rows_of(rollouts, "greedy", category="task", extract=str.strip),
        *rows_of([rollouts[0], rollouts[0]], "sampled", category="task", extract=str.strip),
    ]
    save_rows(rows, folder / "rows.parquet")
    assert load_rows(folder / "rows.parquet") == rows
    return folder


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    hostile = "2\x1b[2J\u202e\nnext"
    return saved(
        tmp_path / "first", [rollout(0, "1 ", 1.0), rollout(1, hostile, 0.0), rollout(2, "?", None)]
    )


def test_missing_rewards_are_none_again(evaluation: Path) -> None:
    rows = load_rows(evaluation / "rows.parquet")
    assert greedy_outcomes(rows) == {"row-0": True, "row-1": False, "row-2": None}
    assert [row["sample"] for row in rows if row["mode"] == "sampled"] == [0, 1]
    assert rows[0]["extracted"] == "1"


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    one, two = (saved(tmp_path / name, [rollout(0, "1", 1.0)]) for name in "ab")
    assert (one / "rows.parquet").read_bytes() == (two / "rows.parquet").read_bytes()


def test_completions_are_shown_without_what_would_move_the_cursor(
    evaluation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(evaluation), "--only", "wrong"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "prompt row-1",
        "asked: 1+1=",
        "said: 2\\x1b[2J\\u202e",
        "  next",
        "wrong: the answer is 2, the reward 0.0",
        "",
        "1 of 1 greedy completions judged wrong",
    ]
    assert main([str(evaluation / "rows.parquet"), "--only", "unjudged"]) == 0
    assert "error: no answer\n  from the judge" in capsys.readouterr().out
    assert main([str(evaluation), "--mode", "sampled", "-n", "1"]) == 0
    assert capsys.readouterr().out.endswith("1 of 2 sampled completions\n")


def test_what_changed_between_two(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = saved(
        tmp_path / "after", [rollout(0, "7", 0.0), rollout(1, "2", 1.0), rollout(2, "3", 1.0)]
    )
    assert main([str(evaluation), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prompt row-0: lost"
    assert "prompt row-1: gained" in lines
    assert "2 of 2 prompts that changed" in lines
    # One gained, one lost, one not judged before.
    assert lines[-1].startswith("no difference shown at 95 % confidence: +0.0 points")


def test_what_is_no_evaluation_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "there is no evaluation in" in capsys.readouterr().err
    pd.DataFrame([{"prompt": "1+1="}]).to_parquet(tmp_path / "rows.parquet")
    assert main([str(tmp_path)]) == 1
    assert "prompt_id is missing from every row" in capsys.readouterr().err
