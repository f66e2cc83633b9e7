"""Compares steps on remote columns with the same steps on local ones.

Policy, engine, sampler and trainer are real; their workers run in this process.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import RemoteRows
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import ConsistencyError, RewardError
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Rollout
from tests.local_workers import LocalSession

NUM_STEPS = 2
GRPO: dict[str, Any] = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": NUM_STEPS,
    "learning_rate": 0.01,
}
BOUND = 1.002
"""Within which some sequences are, and others are not, where the engine's weights are noisy."""
OFF = {
    "max_sequence_mult_prob_error": BOUND,
    "max_token_mult_prob_error": BOUND,
    "max_masked_fraction": 0.99,
}
IN_REWARD = {"kl": {"beta": 0.5, "place": "in_reward"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "one optimizer step": {},
    "several optimizer steps": {"train_global_batch_size": 8},
    "without a reference": {"loss": {"kl": None}},
    "truncated ones left out": {"overlong": {"kind": "filter"}},
    "long ones punished": {"overlong": {"kind": "penalty", "buffer_tokens": 3, "penalty": 0.5}},
    "groups drawn again": {"dynamic_sampling": {"max_draws": 3}},
    "returns of tokens": {"advantage": {"kind": "reinforce_plus_plus"}},
    "returns of tokens over a baseline": {
        "advantage": {"kind": "reinforce_plus_plus_baseline"},
        "loss": {"kl": None},
    },
    "returns of tokens, several optimizer steps": {
        "advantage": {"kind": "reinforce_plus_plus_baseline"},
        "train_global_batch_size": 8,
        "overlong": {"kind": "filter"},
    },
    "returns of tokens less the KL": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "loss": IN_REWARD,
        "overlong": {"kind": "penalty", "buffer_tokens": 3, "penalty": 0.5},
    },
    "rewards less the KL": {"loss": IN_REWARD, "train_global_batch_size": 8},
    "rewards less the KL, truncated ones left out": {
        "advantage": {"kind": "leave_one_out"},
        "loss": IN_REWARD,
        "overlong": {"kind": "filter"},
    },
    "returns of tokens of sequences that are off": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "gate": OFF,
    },
    "returns less the KL of sequences that are off": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "loss": IN_REWARD,
        "gate": OFF,
    },
    "sequences that are off": {"gate": OFF},
    "sequences that are off, truncated ones left out": {
        "overlong": {"kind": "filter"},
        "gate": OFF,
    },
}


class Sevens(Scorer):
    """Often varies within a group; completions that begin with a minus cannot be scored."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        return [
            RewardError("it begins with a minus")
            if each.text.startswith("-")
            else each.text.count("7") + 0.1 * len(each.text)
            for each in rollouts
        ]


class InProcessTrainer(GRPOTrainer):
    """Sends weights within the process."""

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        session: Any = self.session
        (trained,), (engine,) = (
            session.groups[name].backends for name in ("training", "generation")
        )
        noise = 1e-4 if self.config.gate.max_sequence_mult_prob_error == BOUND else 0.0
        generator = torch.Generator().manual_seed(0)
        engine.take_weights(
            (name, each + noise * torch.randn(each.shape, generator=generator))
            for name, each in trained.named_weights()
        )
        generation = sampler.generation
        assert isinstance(generation, Generation)
        generation._source = generation._proven = self.policy


def trained(
    model: Path,
    folder: Path,
    *,
    scorer: Scorer | None = None,
    rollouts: dict[str, Any] | None = None,
    replay: Path | None = None,
    **grpo: Any,
) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(5)]
    data = DataModule.of(
        rows, validation=[{"prompt": "1+1=", "answer": "2"}], tokenizer=load_tokenizer(model)
    )
    train = folder / "train"
    train.mkdir(parents=True)
    save_frame(data.train, train)
    trainer = InProcessTrainer(
        {
            "generation": {"backend": "hf", "max_new_tokens": 6},
            "rollouts": {"max_failed_fraction": 0.9, **(rollouts or {})},
            "max_prompt_tokens": 16,
            "grpo": {**GRPO, **grpo},
        },
        session=LocalSession(),  # type: ignore[arg-type]
    )
    work = folder / "work"
    scored_by = scorer or Sevens()
    trainer.run(
        RunSpec(
            train=train, start=model, work=work, reference=model, scorer=scored_by, replay=replay
        )
    )
    return work


def read_locally(patch: pytest.MonkeyPatch) -> None:
    """Makes the columns of batches local, like those of a custom policy."""
    original = RolloutTrainer._batch
    patch.setattr(RolloutTrainer, "_batch", lambda *args: original(*args).fetched())


def assert_equal(remote: Path, here: Path) -> None:
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (remote, here))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = [MetricsFile(folder / "metrics.jsonl").read() for folder in (remote, here)]
    assert [each.metrics for each in steps[0]] == [each.metrics for each in steps[1]]
    advantages = []
    for step in range(1, NUM_STEPS + 1):
        records = [RolloutRecords(folder / "rollouts").load(step) for folder in (remote, here)]
        assert records[0] == records[1]
        advantages += [each.advantage for each in records[0]]
    assert any(advantages)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_remote_rollouts_train_bitwise_identically(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = trained(tiny_model, tmp_path / "remote", **VARIANTS[variant])
    with monkeypatch.context() as patch:
        read_locally(patch)
        here = trained(tiny_model, tmp_path / "here", **VARIANTS[variant])
    assert_equal(remote, here)
    inconsistent = [
        each.metrics["num_inconsistent_sequences"]
        for each in MetricsFile(remote / "metrics.jsonl").read()
    ]
    assert any(inconsistent) == ("gate" in VARIANTS[variant])


@pytest.mark.slow
def test_inconsistent_sequences_are_not_trained_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares a step with gradients before the gate to one with the gate first."""
    once = trained(tiny_model, tmp_path / "once", gate=OFF)
    monkeypatch.setattr(GRPOTrainer, "_updates_once", lambda *_: False)
    gated_first = trained(tiny_model, tmp_path / "gated_first", gate=OFF)
    assert_equal(once, gated_first)


def noted_readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that fetch remote rows, one entry per fetch."""
    readers: list[str] = []
    original = RemoteRows.fetched

    def noted(rows: RemoteRows) -> Any:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name in {"noted", "fetched"}:
            frame = frame.f_back
        assert frame is not None
        readers.append(frame.f_code.co_qualname)
        return original(rows)

    monkeypatch.setattr(RemoteRows, "fetched", noted)
    return readers


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["one optimizer step", "returns of tokens", "returns of tokens less the KL"]
)
def test_only_texts_and_records_of_a_step_are_fetched(
    variant: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines read their rows; the controller fetches only for records, once per step."""
    readers = noted_readers(monkeypatch)
    work = trained(tiny_model, tmp_path / "remote", **VARIANTS[variant])
    of_records = ("CompletionSource.texts", "CompletionSource.tokens", "save_rollouts")
    assert set(readers) == {"training_columns", *of_records}
    assert {readers.count(each) for each in of_records[1:]} == {NUM_STEPS}
    rows = pq.read_table(work / "rollouts" / "step_000001.parquet").to_pylist()
    for row in rows:
        engine = [] if row["error"] else row["logprobs"]
        assert row["trainer_logprobs"] == pytest.approx(engine, abs=1e-4)
    assert any(row["trainer_logprobs"] for row in rows)


@pytest.mark.slow
def test_a_gate_that_stops_the_run_names_the_sequences(tiny_model: Path, tmp_path: Path) -> None:
    bounds = {"max_token_mult_prob_error": 1.0 + 1e-9, "max_sequence_mult_prob_error": 1e9}
    with pytest.raises(ConsistencyError, match=r"sequence \d+ \(.*\) at position \d+"):
        trained(tiny_model, tmp_path / "remote", gate=bounds)
