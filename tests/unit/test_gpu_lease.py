"""`deployment/gpu_lease.py` at tiny sizes: each case reports figures; failures do not end it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.commands import REPOSITORY


def leased(*arguments: str) -> list[dict[str, Any]]:
    limits = ["--seconds", "1000", "--case-seconds", "300"]  # an argument overrides them
    command = [sys.executable, "deployment/gpu_lease.py", "--tiny", *limits, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.thorough
def test_compiling_does_not_change_the_losses() -> None:
    eager, compiled = leased("b1", "b2")
    for figures in (eager, compiled):
        assert "error" not in figures, figures["error"]
        assert figures["tokens_per_second"] > 0 and figures["mfu"] >= 0
    assert eager["graphs"] == 0 and compiled["graphs"] > 0 and compiled["graph_breaks"] == 0
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=2e-2)  # bfloat16
    assert eager["losses"][-1] < eager["losses"][0]


def test_a_case_without_time_is_named() -> None:
    (figures,) = leased("a1", "--seconds", "0")
    assert figures["error"] == "no time left"


@pytest.mark.thorough
def test_every_case_runs() -> None:
    for figures in leased():
        if figures["float8"] == "none" or find_spec("torchao"):
            assert "error" not in figures, figures
        else:
            assert "torchao" in figures["error"]
