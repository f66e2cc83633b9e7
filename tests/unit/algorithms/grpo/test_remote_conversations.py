"""Compares steps on remote conversations with the same steps on local ones.

Policies, engine, sampler and trainers are real; their workers run in this process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.conversations import ROOM, Chat
from tests.unit.algorithms.grpo.test_remote_training import (
    NUM_STEPS,
    VARIANTS,
    assert_equal,
    noted_readers,
    read_locally,
    trained,
)
from tests.unit.algorithms.ppo.test_remote_ppo import trained as trained_by_ppo

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


@pytest.mark.slow
@pytest.mark.parametrize("variant", OF_GRPO)
def test_remote_conversations_train_bitwise_identically(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = trained(tiny_model, tmp_path / "remote", **chatting(), **VARIANTS[variant])
    with monkeypatch.context() as patch:
        read_locally(patch)
        here = trained(tiny_model, tmp_path / "here", **chatting(), **VARIANTS[variant])
    assert_equal(remote, here)
    turns = {len(each.turn_rewards) for each in RolloutRecords(remote / "rollouts").load(1)}
    assert len(turns) > 1


@pytest.mark.slow
@pytest.mark.parametrize("variant", OF_PPO)
def test_remote_conversations_train_a_critic_bitwise_identically(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = trained_by_ppo(tiny_model, tmp_path / "remote", **chatting(), **OF_PPO[variant])
    with monkeypatch.context() as patch:
        read_locally(patch)
        here = trained_by_ppo(tiny_model, tmp_path / "here", **chatting(), **OF_PPO[variant])
    assert_equal(remote, here)
    critics = [
        load_file(each / "critic" / "model" / "model.safetensors") for each in (remote, here)
    ]
    assert all(torch.equal(critics[0][name], each) for name, each in critics[1].items())


@pytest.mark.slow
def test_only_records_fetch_tokens_of_a_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines read their rows; the controller reads only texts, once per turn."""
    monkeypatch.delattr(Chat, "global_post_process_and_metrics")  # it reads the full batch
    readers = noted_readers(monkeypatch)
    trained(tiny_model, tmp_path / "remote", **chatting())
    assert set(readers) == {
        "training_columns",
        "results_of",
        "full_requests",
        "CompletionSource.texts",
        "CompletionSource.tokens",
    }
    assert readers.count("CompletionSource.tokens") == NUM_STEPS
