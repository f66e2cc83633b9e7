"""Artifacts in a folder, and child processes with a separate store."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.distributed.resources import ResourceManager
from tasks.local_run import preflight

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a new process and returns what it printed."""

    def run(script: str, *arguments: object, root: Path = REPOSITORY) -> str:
        environment = {
            **os.environ,
            "NEMO_RL_HOME": str(tmp_path / "store"),
            "PYTHONPATH": str(root),
            "PYTHONSAFEPATH": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", script, *(str(argument) for argument in arguments)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes checks count this machine's resources, even if an earlier test left Ray running."""
    monkeypatch.setattr(preflight, "resources_of_runs", ResourceManager.of_this_machine)
