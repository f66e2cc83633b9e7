"""Compares steps on remote conversations with the same steps on local ones.

Policies, engine, sampler and trainers are real; their workers run in this process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.telemetry.metrics import MetricsFile
from tests.conversations import ROOM, Chat
from tests.episode_samples import split_by_turn
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


OF_SAMPLES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "sequences": {"loss": {"reduction": "sequence_mean"}},
    "optimizer steps": {"train_global_batch_size": 8, "advantage": {"kind": "leave_one_out"}},
    "KL in reward": {"loss": {"kl": {"beta": 0.5, "place": "in_reward"}}},
    "turns": {"advantage": {"credit": "turn"}},
    "turns, optimizer steps": {"advantage": {"credit": "turn"}, "train_global_batch_size": 8},
}
_IN_CI = ("sequences", "turns")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, marks=pytest.mark.slow if each in _IN_CI else pytest.mark.thorough)
        for each in OF_SAMPLES
    ],
)
def test_an_episode_of_several_samples_trains_as_one(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn becomes a sample, whose prompt is all that the policy has read before it."""
    grpo = OF_SAMPLES[variant] | {"adam_epsilon": 1e-3}  # a gradient of rounding moves no weight
    unsplit = trained(tiny_model, tmp_path / "unsplit", **chatting(), **grpo)
    run = MultiTurnRollouts.run
    monkeypatch.setattr(
        MultiTurnRollouts,
        "run",
        lambda *args, **options: RemoteRollouts.of(split_by_turn(run(*args, **options))),
    )
    remote = trained(tiny_model, tmp_path / "remote", **chatting(), **grpo)
    replayed = trained(
        tiny_model, tmp_path / "replay", **chatting(), **grpo, replay=remote / "rollouts"
    )
    with monkeypatch.context() as patch:
        read_locally(patch)
        here = trained(tiny_model, tmp_path / "here", **chatting(), **grpo)
    assert_equal(remote, here)
    weights = [
        load_file(folder / "model" / "model.safetensors") for folder in (remote, replayed, unsplit)
    ]
    assert all(torch.equal(weights[1][name], each) for name, each in weights[0].items())
    for name, each in weights[0].items():
        torch.testing.assert_close(each, weights[2][name], rtol=0, atol=2e-5, msg=name)
    steps = [MetricsFile(folder / "metrics.jsonl").read() for folder in (remote, unsplit)]
    for ours, theirs in zip(*steps, strict=True):
        for name in ("reward", "reward_std", "num_turns", "failed_fraction", "loss", "grad_norm"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=2e-4), name
    assert max(each.part for each in RolloutRecords(remote / "rollouts").load(1)) > 0


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
        "save_rollouts",
    }
    assert readers.count("CompletionSource.tokens") == NUM_STEPS
