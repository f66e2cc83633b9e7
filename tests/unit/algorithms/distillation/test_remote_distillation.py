"""Compares distillation on remote rollouts with distillation on the same local ones.

The teacher's top-k logprobs, many numbers per token, then stay with the ranks.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.algorithms.distillation.trainer import DistillationTrainer
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import RemoteRows
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.loop import RunSpec
from tests.conversations import ROOM, Chat
from tests.local_workers import LocalSession
from tests.unit.algorithms.grpo.test_remote_training import read_locally

NUM_STEPS = 2


class InProcessTrainer(DistillationTrainer):
    """Sends weights within the process."""

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        session: Any = self.session
        (trained,), (engine,) = (
            session.groups[name].backends for name in ("training", "generation")
        )
        engine.take_weights(trained.named_weights())
        generation: Any = sampler.generation
        generation._source = generation._proven = self.policy


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_model, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: each + 0.1 * torch.randn(each.shape, generator=generator)
        for name, each in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trained(model: Path, teacher: Path, folder: Path, *, talks: bool) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(5)]
    train = folder / "train"
    train.mkdir(parents=True)
    save_frame(DataModule.of(rows, tokenizer=load_tokenizer(model)).train, train)
    trainer = InProcessTrainer(
        {
            "generation": {"backend": "hf", "max_new_tokens": 6},
            "rollouts": ROOM if talks else {},
            "max_prompt_tokens": 16,
            "distillation": {
                "num_prompts_per_step": 4,
                "num_generations_per_prompt": 2,
                "num_steps": NUM_STEPS,
                "save_every_num_steps": NUM_STEPS,
                "learning_rate": 0.01,
                "top_k": 5,
            },
        },
        session=LocalSession(),  # type: ignore[arg-type]
    )
    work = folder / "work"
    scorer = EnvironmentScorer(Chat()) if talks else None
    trainer.run(RunSpec(train=train, start=model, work=work, reference=teacher, scorer=scorer))
    return work


@pytest.mark.slow
@pytest.mark.parametrize("talks", [False, True], ids=["single turns", "conversations"])
def test_remote_rollouts_train_bitwise_identically(
    tiny_model: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, talks: bool
) -> None:
    kept: list[bool] = []
    original = Policy.get_reference_topk_logprobs

    def noted(policy: Policy, *args: Any) -> Any:
        columns = original(policy, *args)
        kept.append(all(isinstance(column, RemoteRows) for column in columns.values()))
        return columns

    monkeypatch.setattr(Policy, "get_reference_topk_logprobs", noted)
    remote = trained(tiny_model, teacher, tmp_path / "remote", talks=talks)
    read_locally(monkeypatch)
    here = trained(tiny_model, teacher, tmp_path / "here", talks=talks)
    assert kept == [True] * NUM_STEPS + [False] * NUM_STEPS
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (remote, here))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    before = load_file(tiny_model / "model.safetensors")
    assert not all(torch.equal(before[name], each) for name, each in theirs.items())
    steps = [MetricsFile(each / "metrics.jsonl").read() for each in (remote, here)]
    assert [each.metrics for each in steps[0]] == [each.metrics for each in steps[1]]
    for step in range(1, NUM_STEPS + 1):
        records = [RolloutRecords(each / "rollouts").load(step) for each in (remote, here)]
        assert records[0] == records[1]
