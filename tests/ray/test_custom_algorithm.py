"""The documentation's example of a custom algorithm, from `docs/extending.md`."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def example() -> str:
    (chosen,) = [block for block in BLOCKS if "register_algorithm" in block]
    return chosen


def test_it_is_short(example: str) -> None:
    assert len(example.splitlines()) < 60


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_imports_of_the_page_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("my_"):
            names = ", ".join(alias.name for alias in node.names)
            exec(f"from {node.module} import {names}", {})


@pytest.mark.thorough
def test_it_trains(example: str, tmp_path: Path) -> None:
    script = tmp_path / "weighted.py"
    script.write_text(example)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "NEMO_RL_HOME": str(tmp_path / "store"),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = re.search(r"^\[(.*)\] (\S+)$", done.stdout, re.M)
    assert report, done.stdout[-2000:]
    rewards = [float(reward) for reward in report[1].split(", ")]
    # About half the completions of random weights end in an even digit.
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.2
    assert (Path(report[2]) / "model.safetensors").is_file()
