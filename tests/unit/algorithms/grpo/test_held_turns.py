"""Steps on conversations that stay with the engine, against the same steps on ones read here.

Policies, engine, sampler and trainers are the real ones; their workers run in this process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.conversations import ROOM, Chat
from tests.unit.algorithms.grpo.test_held_training import (
    NUM_STEPS,
    VARIANTS,
    assert_equal,
    noted_readers,
    read_here,
    trained,
)
from tests.unit.algorithms.ppo.test_held_ppo import trained as trained_by_ppo

OF_GRPO = (
    "one optimizer step",
    "several optimizer steps",
    "truncated ones left out",
    "long ones punished",
    "groups drawn again",
    "returns of tokens",
    "returns of tokens less the KL",
    "rewards less the KL",
    "sequences that are off",
)
OF_PPO: dict[str, dict[str, Any]] = {
    "one optimizer step": {},
    "several optimizer steps": {"train_global_batch_size": 8, "bootstrap_truncated": True},
}


def chatting() -> dict[str, Any]:
    return {"rollouts": ROOM, "scorer": EnvironmentScorer(Chat())}


@pytest.mark.parametrize("variant", OF_GRPO)
def test_held_conversations_train_to_the_same_bits(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = trained(tiny_model, tmp_path / "held", **chatting(), **VARIANTS[variant])
    with monkeypatch.context() as patch:
        read_here(patch)
        here = trained(tiny_model, tmp_path / "here", **chatting(), **VARIANTS[variant])
    assert_equal(held, here)
    turns = {len(each.turn_rewards) for each in RolloutRecords(held / "rollouts").load(1)}
    assert len(turns) > 1


@pytest.mark.parametrize("variant", OF_PPO)
def test_held_conversations_train_a_critic_to_the_same_bits(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = trained_by_ppo(tiny_model, tmp_path / "held", **chatting(), **OF_PPO[variant])
    with monkeypatch.context() as patch:
        read_here(patch)
        here = trained_by_ppo(tiny_model, tmp_path / "here", **chatting(), **OF_PPO[variant])
    assert_equal(held, here)
    critics = [load_file(each / "critic" / "model" / "model.safetensors") for each in (held, here)]
    assert all(torch.equal(critics[0][name], each) for name, each in critics[1].items())


def test_no_token_of_a_step_is_fetched_but_by_its_records(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines read their own rows; here texts are read, once a turn."""
    monkeypatch.delattr(Chat, "global_post_process_and_metrics")  # it asks for the whole batch
    readers = noted_readers(monkeypatch)
    trained(tiny_model, tmp_path / "held", **chatting())
    assert set(readers) == {
        "_read",
        "held_results",
        "whole_requests",
        "HeldSource.texts",
        "HeldSource.tokens",
    }
    assert readers.count("HeldSource.tokens") == NUM_STEPS
