"""Rewards that raise or are not numbers stop a run with their reason; scores are not invented."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.generation import VllmGeneration

REWARDS = """
def raises(prompt: str, response: str) -> float:
    raise LookupError("no answer sheet")

def is_no_number(prompt: str, response: str) -> float:
    return float("nan")

def is_text(prompt: str, response: str) -> float:
    return "good"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["raised for prompt", "LookupError", "no answer sheet"]),
        ("is_no_number", ["returned", "nan"]),
        ("is_text", ["returned", "'good'"]),
    ],
)
def test_a_bad_reward_stops_the_run_with_its_reason(
    engine: VllmGeneration,
    session: ClusterSession,
    run_grpo: Callable[..., Any],
    own_store: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: list[str],
) -> None:
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    running = session._groups["generation"][1]
    finished = run_grpo(
        {
            "model": {"name": str(tiny_model)},
            "data": {"kind": "arithmetic", "num_train": 16, "num_validation": 4, "max_operand": 9},
            "environment": {"kind": "function", "target": f"bad_rewards:{name}"},
            "sft": {"global_batch_size": 8},
            "grpo": {"num_prompts_per_step": 8},
            "generation": {"max_new_tokens": 6, "max_num_seqs": 64},
            "cluster": {"num_threads": 1},
            "evaluation": {"num_samples_per_prompt": 1},
        }
    )
    assert finished.exit_code == 1
    for word in [f"bad_rewards:{name}", "got:", "fix:", *words]:
        assert word in finished.text
    # Two of the errors with their locations, each broken into lines by the frame.
    assert len(finished.message) < 14
    assert "Traceback" not in finished.output
    assert "evaluate  FAILED" in finished.output
    (log,) = (own_store / "runs").glob("*/run.log")
    assert "RewardError" in log.read_text()
    # Ray and the engine existed before the run and are unchanged.
    assert session in sessions._sessions.values()
    assert session._groups["generation"][1] is running
