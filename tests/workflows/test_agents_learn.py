"""The examples of docs/tools.md and docs/agents.md learn, without a GPU and with several seeds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import REPOSITORY, all_blocks

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of both pages."""
    folder = tmp_path_factory.mktemp("examples")
    for block in all_blocks("python", "yaml"):
        name = re.match(r"# (\w+\.(?:py|yaml))\b", block.text)
        if block.page in ("docs/tools.md", "docs/agents.md") and name is not None:
            (folder / name[1]).write_text(block.text)
    subprocess.run([sys.executable, "rows.py"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["guess.yaml", "grpo_sums.yaml", "agent_sums.yaml"])
def test_an_example_learns(folder: Path, recipe: str, seed: int) -> None:
    finished = subprocess.run(
        [REPOSITORY / ".venv/bin/nemo-rl", "run", "grpo", recipe, f"seed={seed}"],
        cwd=folder,
        env={**os.environ, "NEMO_RL_HOME": str(folder / "store"), "OMP_NUM_THREADS": "2"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    figures = re.findall(r"^sampled: pass@1 \S+ \[(\S+), (\S+)\]", finished.stdout, re.MULTILINE)
    (_, highest_before), (lowest_after, _) = figures
    assert float(lowest_after) > float(highest_before), figures
