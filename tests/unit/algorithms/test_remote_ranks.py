"""Compares steps over three ranks that read remote rows with steps on the same local rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer, PPOTrainer
from nemo_rl_core.algorithms.distillation.trainer import DistillationTrainer
from nemo_rl_core.algorithms.grpo.data import with_outcomes
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.ppo.loss import PPOLossFn, ValueLossFn
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS, TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRows,
    as_block,
)
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.batch import mean_advantages
from nemo_rl_core.telemetry.usage import Timer
from tests.local_workers import LocalSession
from tests.unit.models.test_remote_compute import NUM_RANKS, batches
from tests.unit.rollouts.test_remote_rollouts import remote_rollouts

KEPT = {"advantages", "prev_logprobs", "returns", "old_values"}


class RowBackend:
    """Computes scores from the tokens of a row; `seen` has the rows of the last gradients."""

    def setup(self, setup: TrainingSetup) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def prefix_sharing(self) -> None:
        return None

    def get_logprobs(self, batch: BatchedDataDict) -> Tensor:
        return -batch["input_ids"][:, 1:] / 100 * batch["token_mask"]

    def get_reference_logprobs(self, batch: BatchedDataDict) -> Tensor:
        return self.get_logprobs(batch) * 1.5 - 0.25 * batch["token_mask"]

    def get_values(self, batch: BatchedDataDict) -> Tensor:
        return batch["input_ids"] / 40 - 1

    def forward_backward(self, batch: BatchedDataDict, loss_fn: Any) -> Any:
        return self.train_step(batch, loss_fn), self.get_logprobs(batch)

    def train_step(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        """Keeps the columns that a loss reads, for the trained tokens of each row."""
        is_trained = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
        for row, length in enumerate(batch["input_lengths"].tolist()):
            columns = {name: batch[name][row][is_trained[row]] for name in KEPT & batch.keys()}
            self.seen.append({"ids": batch["input_ids"][row, :length], **columns})
        moments = ("return_mean", "return_square", "value_error_mean", "value_error_square")
        of_critic = (*moments, "value_loss", "value_mean", "value_clip_fraction")
        names = of_critic if isinstance(loss_fn, ValueLossFn) else ("loss",)
        return dict.fromkeys((*names, "num_valid_tokens"), 1.0)

    def optimizer_step(self) -> dict[str, float]:
        return {}


class SharingBackend(RowBackend):
    """A backend whose ranks compute shared prefixes once."""

    def prefix_sharing(self) -> Any:
        return PrefixSharing(1.0)

    def get_reference_topk_logprobs(self, batch: BatchedDataDict, k: int) -> Any:
        logprobs = self.get_reference_logprobs(batch)[:, :, None].expand(-1, -1, k).contiguous()
        return logprobs.long(), logprobs


@pytest.fixture
def policy_of(tiny_model: Path) -> Iterator[Callable[[int], Policy]]:
    _TRAINING_BACKENDS["dtensor"] = RowBackend  # restored after the test

    def make(num_ranks: int) -> Policy:
        session: Any = LocalSession(num_ranks)
        return Policy(session, TrainingSetup(tiny_model, OptimizerConfig(), 64))

    yield make
    del _TRAINING_BACKENDS._registered["dtensor"]


def seen_by(policy: Policy) -> list[dict[str, Tensor]]:
    """Returns the rows of all ranks' last gradients, sorted by their tokens."""
    workers: Any = policy.workers
    rows = [row for backend in workers.backends for row in backend.seen]
    return sorted(rows, key=lambda row: row["ids"].tolist())


def assert_close(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        for name, value in yours.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5)


def remote_column(name: str, values: Tensor) -> RemoteRows:
    return RemoteRows.of_blocks([InProcess(as_block({name: values}))], [len(values)]).of_column(
        name
    )


def scored(size: int) -> tuple[BatchedDataDict, BatchedDataDict]:
    """Returns the same rows locally and remotely; engine and trainer have equal logprobs."""
    here, remote = batches(size)
    drawn = torch.Generator().manual_seed(size)
    columns = {
        "rewards": torch.randint(0, 9, (size,), generator=drawn).float(),
        "truncated": torch.arange(size) % 5 == 1,
        "group_ids": torch.arange(size) // 2,
        "rollout_lengths": here["token_mask"].sum(dim=1),
    }
    of_tokens = {
        "generation_logprobs": RowBackend().get_logprobs(here),
        "weight_versions": 4 * here["token_mask"]
        - here["token_mask"] * (torch.arange(size) % 2)[:, None],
    }
    for batch in (here, remote):
        del batch["advantages"]
        batch.update(columns)
    here.update(of_tokens)
    remote.update({name: remote_column(name, values) for name, values in of_tokens.items()})
    return here, remote


IN_REWARD = {"kl": {"kind": "k1", "beta": 0.3, "place": "in_reward"}}
GRPO: dict[str, dict[str, Any]] = {
    "returns": {"advantage": {"kind": "reinforce_plus_plus"}},
    "returns over a baseline": {
        "advantage": {"kind": "reinforce_plus_plus_baseline"},
        "overlong": {"kind": "filter"},
    },
    "returns in parts": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "train_global_batch_size": 20,
    },
    "returns less the KL": {"advantage": {"kind": "reinforce_plus_plus"}, "loss": IN_REWARD},
    "rewards less the KL": {
        "loss": IN_REWARD,
        "train_global_batch_size": 20,
        "overlong": {"kind": "penalty", "buffer_tokens": 3, "penalty": 0.5},
    },
}


@pytest.mark.parametrize("size", [2, 50])
@pytest.mark.parametrize("variant", GRPO)
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, AsyncGRPOTrainer])
def test_grpo_on_remote_rows_matches_local_rows(
    variant: str,
    size: int,
    trainer_class: type[GRPOTrainer],
    policy_of: Callable[[int], Policy],
) -> None:
    settings = {"num_prompts_per_step": 30, "num_generations_per_prompt": 2, **GRPO[variant]}
    results, policies = [], (policy_of(1), policy_of(NUM_RANKS))
    for rows, policy in zip(scored(size), policies, strict=True):
        trainer = trainer_class({"grpo": settings, "generation": {"max_new_tokens": 12}})
        trainer.policy, trainer.timer, trainer.step, trainer.sampler = policy, Timer(), 5, None
        trainer._loss = GRPOLossFn(trainer.config.loss)
        trainer._may_update_once = policy.splits_steps and not trainer.config.has_kl_in_reward
        outcomes = with_outcomes(rows, trainer.config, max_new_tokens=12)
        batch = BatchedDataDict({**outcomes, "compared_mask": rows["sample_mask"]})
        once = trainer._updates_once(batch)
        data, consistency, _ = (
            trainer._update_once(batch) if once else trainer._update_in_parts(batch)
        )
        assert data.is_remote == batch.is_remote
        results.append((data, consistency, seen_by(policy)))
    (here, expected, theirs), (remote, consistency, ours) = results
    assert_close(ours, theirs)
    assert isinstance(remote["advantages"], RemoteRows) == ("returns" in variant)
    torch.testing.assert_close(mean_advantages(remote), mean_advantages(here), rtol=1e-5, atol=1e-5)
    assert mean_advantages(here).any() or size == 2
    assert consistency["token_mult_prob_error"] == 1.0
    if trainer_class is AsyncGRPOTrainer:
        assert consistency["staleness"] == expected["staleness"] > 0


PPO: dict[str, dict[str, Any]] = {
    "one optimizer step": {"gamma": 0.9},
    "several optimizer steps": {"train_global_batch_size": 20, "bootstrap_truncated": True},
    "without a reference": {"kl": None},
}


@pytest.mark.parametrize("size", [2, 50])
@pytest.mark.parametrize("variant", PPO)
def test_ppo_on_remote_rows_matches_local_rows(
    variant: str, size: int, policy_of: Callable[[int], Policy]
) -> None:
    settings = {"num_prompts_per_step": 60, "num_epochs_per_rollout": 1, **PPO[variant]}
    results = []
    for batch, num_ranks in zip(scored(size), (1, NUM_RANKS), strict=True):
        trainer = PPOTrainer({"ppo": settings})
        trainer.policy, trainer.critic = policy_of(num_ranks), policy_of(num_ranks)
        trainer.timer, trainer.step = Timer(), 1
        trainer._policy_loss, trainer._value_loss = PPOLossFn(), ValueLossFn()
        logprobs, consistency = trainer._with_logprobs(batch)
        data = trainer._with_advantages(logprobs)
        trainer._train(data)
        assert data.is_remote == batch.is_remote
        results.append((data, consistency, seen_by(trainer.policy), seen_by(trainer.critic)))
    (here, _, *theirs), (remote, consistency, *ours) = results
    for mine, yours in zip(ours, theirs, strict=True):
        assert_close(mine, yours)
        assert all({"advantages", "returns", "old_values"} <= row.keys() for row in mine)
    torch.testing.assert_close(mean_advantages(remote), mean_advantages(here), rtol=1e-5, atol=1e-5)
    assert mean_advantages(here).any()
    assert consistency["token_mult_prob_error"] == 1.0


ANY_GATE = {"max_token_mult_prob_error": 1e9, "max_sequence_mult_prob_error": 1e9}


@pytest.mark.parametrize(
    "trainer",
    [PPOTrainer({"ppo": {"gate": ANY_GATE}}), DistillationTrainer({})],
    ids=["ppo", "distillation"],
)
def test_completions_of_a_prompt_stay_on_the_rank_that_shares_it(
    trainer: Any, policy_of: Callable[[int], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    _TRAINING_BACKENDS["dtensor"] = SharingBackend
    rollouts = remote_rollouts().with_outcomes([1.0, 0.0, 0.5])
    monkeypatch.setattr(trainer, "_roll_out", lambda _: rollouts)
    monkeypatch.setattr(trainer, "_record", lambda *_, **__: {})
    trainer.policy, trainer.critic = policy_of(NUM_RANKS), policy_of(NUM_RANKS)
    trainer.timer, trainer.step = Timer(), 1
    trainer._policy_loss, trainer._value_loss, trainer._loss = PPOLossFn(), ValueLossFn(), None
    trainer._train_step([])
    seen = [backend.seen for backend in trainer.policy.workers.backends]
    prompts = [sorted({int(row["ids"][0]) for row in rows}) for rows in seen]
    assert sorted(prompts) == [[], [5], [7]]
