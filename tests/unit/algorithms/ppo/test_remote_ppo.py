"""Compares PPO on remote rollouts with PPO on the same local ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import PPOTrainer
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import RemoteRows
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.trainers.loop import RunSpec
from tests.local_workers import LocalSession
from tests.unit.algorithms.grpo.test_remote_training import (
    NUM_STEPS,
    OFF,
    InProcessTrainer,
    Sevens,
    assert_equal,
    noted_readers,
    read_locally,
)

PPO: dict[str, Any] = {
    "num_prompts_per_step": 8,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": NUM_STEPS,
    "learning_rate": 0.01,
    "gamma": 0.9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one optimizer step": {},
    "several optimizer steps": {"train_global_batch_size": 8, "bootstrap_truncated": True},
    "without a reference": {"kl": None, "critic": {"value_clip": None}},
    "only the critic at first": {"num_critic_warmup_steps": 1, "kl": {"beta": 0.5}},
    "sequences that are off": {"gate": OFF},
}


class InProcessPPO(PPOTrainer):
    """Sends weights within the process."""

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        InProcessTrainer._update_weights(self, sampler, last_step=last_step)  # type: ignore[arg-type]


def trained(
    model: Path,
    folder: Path,
    *,
    scorer: Scorer | None = None,
    rollouts: dict[str, Any] | None = None,
    **ppo: Any,
) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(5)]
    train = folder / "train"
    train.mkdir(parents=True)
    save_frame(DataModule.of(rows, tokenizer=load_tokenizer(model)).train, train)
    trainer = InProcessPPO(
        {
            "generation": {"backend": "hf", "max_new_tokens": 6},
            "rollouts": {"max_failed_fraction": 0.9, **(rollouts or {})},
            "max_prompt_tokens": 16,
            "ppo": {**PPO, **ppo},
        },
        session=LocalSession(),  # type: ignore[arg-type]
    )
    work = folder / "work"
    scored_by = scorer or Sevens()
    trainer.run(RunSpec(train=train, start=model, work=work, reference=model, scorer=scored_by))
    return work


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_remote_rollouts_train_bitwise_identically(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_steps: list[bool] = []
    original = Policy.train

    def noted(policy: Policy, data: Any, loss_fn: Any) -> Any:
        remote_steps.append(isinstance(data["advantages"], RemoteRows))
        return original(policy, data, loss_fn)

    monkeypatch.setattr(Policy, "train", noted)
    remote = trained(tiny_model, tmp_path / "remote", **VARIANTS[variant])
    assert all(remote_steps) == ("gate" not in VARIANTS[variant])  # which fetches inconsistent rows
    with monkeypatch.context() as patch:
        read_locally(patch)
        here = trained(tiny_model, tmp_path / "here", **VARIANTS[variant])
    assert_equal(remote, here)
    critics = [
        load_file(each / "critic" / "model" / "model.safetensors") for each in (remote, here)
    ]
    assert all(torch.equal(critics[0][name], each) for name, each in critics[1].items())
    before = load_file(tiny_model / "model.safetensors")
    for folder in (remote, remote / "critic"):
        after = load_file(folder / "model" / "model.safetensors")
        assert not all(torch.equal(before[name], after[name]) for name in before.keys() & after)


@pytest.mark.slow
def test_only_texts_and_records_of_a_step_are_fetched(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = noted_readers(monkeypatch)
    trained(tiny_model, tmp_path / "remote", train_global_batch_size=8)
    of_records = ("CompletionSource.texts", "CompletionSource.tokens", "save_rollouts")
    assert set(readers) == {"training_columns", *of_records}
    assert {readers.count(each) for each in of_records[1:]} == {NUM_STEPS}
