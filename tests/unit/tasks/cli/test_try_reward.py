"""`nemo-rl try-reward`: rewards before a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from workflows import cli

REWARDS = """
def near(completion, answer):
    return 1.0 / (1 + abs(int(answer) - int(completion)))


def digits(completion, answer):
    return float(completion.isdigit())


def blind(completion):
    return 0.5


async def level(completion, difficulty):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tried_rewards", raising=False)
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    return tmp_path


def tried(folder: Path, environment: dict[str, Any], *options: str, **sections: Any) -> Result:
    recipe = folder / "recipe.yaml"
    sections |= {"recipe": "grpo_arithmetic", "seed": 1, "environment": environment}
    recipe.write_text(yaml.safe_dump(sections))
    return CliRunner().invoke(cli.group, ["try-reward", str(recipe), *options])


def function(name: str) -> dict[str, Any]:
    return {"kind": "function", "target": f"tried_rewards:{name}"}


def lines(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines() if line[:3].strip().isdigit()]


def test_right_and_wrong_completions_are_scored(folder: Path) -> None:
    parts = [{"environment": function("digits")}, {"weight": 2, "environment": {"kind": "exact"}}]
    result = tried(folder, {"kind": "weighted_sum", "parts": parts}, "-n", "3")
    assert result.exit_code == 0, result.output
    assert [line[:3] for line in lines(result)] == [
        [row, source, reward]
        for row in "012"
        for source, reward in (("reference", "3"), ("wrong", "1"), ("none", "0"))
    ]
    assert "3 = 1 + 1 weighted" in result.stdout


def test_an_error_shows_its_line_and_the_exit_code(folder: Path) -> None:
    result = tried(folder, function("near"), "-n", "1")
    assert result.exit_code == 1
    assert [line[1] for line in lines(result)] == ["reference", "wrong", "none"]
    assert [line[2] == "failed" for line in lines(result)] == [False, False, True]
    assert "ValueError: invalid literal for int()" in result.stdout
    assert "(tried_rewards.py:3: return 1.0 / (1 + abs(int(answer) - int(completion))))" in (
        result.stdout
    )


def test_a_constant_reward_is_reported(folder: Path) -> None:
    result = tried(folder, function("blind"))
    assert result.exit_code == 0
    assert len(lines(result)) == 15
    assert "The reference answers earn the same as the wrong completions." in result.stdout
    assert "The reference answers" not in tried(folder, {"kind": "exact"}).stdout


def test_a_missing_column_is_named(folder: Path) -> None:
    result = tried(folder, function("level"))
    assert result.exit_code == 2
    assert "lacks the column difficulty" in result.output
    assert "prompt, completion, response" in result.output


def test_a_multi_turn_environment_replies(folder: Path) -> None:
    result = CliRunner().invoke(cli.group, ["try-reward", "grpo_guess_number", "-n", "1"])
    assert result.exit_code == 0, result.output
    reference, _, none = lines(result)
    assert reference[2:4] == ["0,", "then"]
    assert none[2:4] == ["-0.2,", "then"]


def test_completions_of_a_model_are_scored(folder: Path, tiny_model: Path) -> None:
    options = ("-n", "1", "--model", str(tiny_model), "--max-new-tokens", "4")
    result = tried(folder, function("digits"), *options)
    assert result.exit_code == 0, result.output
    assert [line[1] for line in lines(result)] == ["reference", "wrong", "none", "model"]


@pytest.mark.slow
def test_solutions_of_rows_are_scored_and_worthless_ones_named(folder: Path) -> None:
    rows = [
        {"prompt": "2+2=", "answer": "4", "completion": "2 and 2 is \\boxed{4}."},
        {"prompt": "2+3=", "answer": "5", "completion": "2 and 3 is \\boxed{6}."},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"kind": "file", "train": "rows.jsonl", "validation": "rows.jsonl"}
    result = tried(folder, {"kind": "math"}, data=data)
    assert result.exit_code == 0, result.output
    assert [line[:3] for line in lines(result)] == [
        [row, source, reward]
        for row, solution in (("0", "1"), ("1", "0"))
        for source, reward in zip(
            ("solution", "reference", "wrong", "none"), (solution, "1", "0", "0"), strict=True
        )
    ]
    assert "Row 1: its solution earns the same as no answer." in result.stdout
    assert "Row 0" not in result.stdout


def test_an_agent_that_computes_its_reward_is_refused(folder: Path) -> None:
    result = tried(folder, {"kind": "agent", "command": ["true"]})
    assert result.exit_code == 2
    assert "run the agent by itself with another model" in result.output
    assert not lines(result)


@pytest.mark.parametrize("name", ["no_such.yaml", "no_such_recipe"])
def test_a_missing_recipe_is_named(folder: Path, name: str) -> None:
    result = CliRunner().invoke(cli.group, ["try-reward", name])
    assert result.exit_code == 2
    assert name in result.output
