"""`nemo-rl check-model` with checks that do not need an engine."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.validation import checks
from tasks.cli.models.check_model import NAMES
from workflows.cli import group


def _fails(folder: Path) -> str:
    raise ConsistencyError("trainer and engine disagree", got="1.5")


@pytest.fixture
def one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"max-model-len": lambda folder: "longest 64", "decode-against-prefill": _fails}
    monkeypatch.setattr(checks, "CHECKS", measured)


def test_the_option_names_the_checks() -> None:
    assert set(NAMES) == checks.CHECKS.keys()


@pytest.mark.usefixtures("one_fails")
def test_every_check_is_a_row_and_a_failed_one_exits_with_code_1(tiny_model: Path) -> None:
    result = CliRunner().invoke(group, ["check-model", str(tiny_model)])
    assert result.exit_code == 1
    rows = [line.split("│")[1:4] for line in result.stdout.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["max-model-len", "passed", "longest 64"],
        ["decode-against-prefill", "failed", "trainer and engine disagree"],
        ["", "", "got: 1.5"],
    ]


@pytest.mark.usefixtures("one_fails")
def test_only_one_check_runs(tiny_model: Path) -> None:
    arguments = ["check-model", str(tiny_model), "--only", "max-model-len"]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0
    assert "failed" not in result.stdout
    assert CliRunner().invoke(group, [*arguments[:-1], "max"]).exit_code == 2
