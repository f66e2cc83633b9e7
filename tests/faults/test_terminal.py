"""Bad input in a separate process: what the user sees, and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(recipe: dict[str, Any], store: Path) -> "subprocess.CompletedProcess[str]":
    pyflyte = Path(sys.executable).with_name("pyflyte")
    return subprocess.run(
        [pyflyte, "run", "workflows/grpo.py", "grpo", "--config", json.dumps(recipe)],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.slow
def test_a_misspelt_key(tmp_path: Path) -> None:
    finished = run({"grpo": {"learning_rat": 0.1}}, tmp_path / "store")
    assert finished.returncode == 2
    assert "did you mean 'learning_rate'?" in finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.parametrize(
    "home",
    [
        "file/below",
        pytest.param("file", marks=pytest.mark.slow),
        pytest.param("/proc/no-store", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_cannot_be_written(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    finished = run({}, tmp_path / home)
    shown = finished.stdout + finished.stderr
    assert finished.returncode == 2, shown
    assert "Traceback" not in shown
    assert "NEMO_RL_HOME" in shown
    for word in ("got:", "fix:"):
        assert word in shown
    assert len([line for line in shown.splitlines() if line.strip()]) < 15
    assert (tmp_path / "file").read_text() == "a file, not a folder"
