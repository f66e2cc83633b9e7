"""The user's command with agents, killed in the middle of steps, resumes with the same weights."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import RECIPE, end_group, run, start
from tests.faults.test_command_faults import iterations
from tests.unit.agents.test_killed_run import wait_until
from tests.unit.agents.test_process import processes_with

pytestmark = pytest.mark.thorough

AGENTS: dict[str, Any] = {
    **RECIPE,
    "sft": {**RECIPE["sft"], "num_steps": 2},
    "generation": {"backend": "hf", "max_new_tokens": 3},
    "environment": {
        "kind": "agent",
        "target": "tests.unit.agents.faulty_agent:run",
        "variables": ["AGENT_FAULT"],
    },
    "rollouts": {"max_turns": 3, "max_rollout_tokens": 60},
    "grpo": {
        **RECIPE["grpo"],
        **{"num_iterations": 1, "num_steps_per_iteration": 5, "save_every_num_steps": 1},
    },
    "evaluation": {"num_samples_per_prompt": 1, "environment": {"kind": "exact"}},
}
FAULT = "none of a command"


def test_a_killed_command_leaves_no_agent_and_resumes_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_FAULT", FAULT)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run(AGENTS, undisturbed).exit_code == 0
    draw = random.Random(0)
    for num_steps in (1, 3):
        command = start(AGENTS, killed)
        try:
            wait_until(lambda steps=num_steps: num_trained(killed) >= steps, seconds=600)
            wait_until(lambda: bool(agents()))
            time.sleep(draw.uniform(0, 0.2))
            os.kill(command.pid, signal.SIGKILL)
            command.wait()
            wait_until(lambda: not agents())
        finally:
            end_group(command)
    finished = run(AGENTS, killed)
    assert finished.exit_code == 0, finished.output[-3000:]
    assert "resumed" in finished.output
    weights = [
        (folder / "model" / "model.safetensors").read_bytes()
        for store in (undisturbed, killed)
        for folder in iterations(store)
    ]
    assert weights[0] == weights[1]


def num_trained(store: Path) -> int:
    """Returns the number of steps that the running stage has reported."""
    reports = store.glob("work/grpo_iteration-*/metrics.jsonl")
    return max((len(each.read_text().splitlines()) for each in reports), default=0)


def agents() -> list[str]:
    return processes_with(f"AGENT_FAULT={FAULT}", named="agents/f")
