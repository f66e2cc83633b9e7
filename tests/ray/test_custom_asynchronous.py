"""Asynchronous GRPO with custom engines and backends, and training in real workers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.ray.ahead import COMMON, NUM_STEPS, ROWS, worker_pid
from tests.ray.test_custom_backends import (
    OwnEngine,
    registered,  # noqa: F401 (a fixture)
)
from tests.training import (
    KeepsWeights,
    assert_equal_weights,
    assert_logprobs_of_named_versions,
    replay,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("registered")]

SETTINGS: dict[str, Any] = {
    **COMMON,
    "num_prompts_per_step": 2,
    "validate_every_num_steps": 2,
}


def settings_of(engine: Any) -> dict[str, Any]:
    if isinstance(engine, str):
        return {**SETTINGS, "generation": {"backend": engine, "max_new_tokens": 4}}
    return {**SETTINGS, "generation": engine, "max_new_tokens": 4}


def fitted(
    model: Path, engine: str, max_staleness: int | None = None, **options: Any
) -> TrainResult:
    named: Any = OwnEngine(model) if engine == "own" else engine
    trainer_class = GRPOTrainer if max_staleness is None else AsyncGRPOTrainer
    asynchronous = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = trainer_class.from_pretrained(model, asynchronous=asynchronous, **settings_of(named))
    return trainer.fit(
        ROWS,
        reward_fn=lambda prompt, text: float(sum(map(ord, text)) % 7),
        validation=[{"prompt": "90+0=", "answer": "90"}, {"prompt": "91+0=", "answer": "91"}],
        **options,
    )


def versions(result: TrainResult) -> list[set[int]]:
    records = RolloutRecords(result.folder / "rollouts")
    return [
        {version for each in records.load(step) for version in each.completion.weight_versions}
        for step in range(1, NUM_STEPS + 1)
    ]


def is_proven(step: dict[str, float]) -> bool:
    return "handover_mult_prob_error" in step


@pytest.mark.parametrize("engine", ["own", "custom", "of_texts", "hf"])
def test_weights_are_those_of_synchronous_training_or_of_older_samples(
    session: ClusterSession, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    synchronous, without_staleness = fitted(tiny_model, engine), fitted(tiny_model, engine, 0)
    assert_equal_weights(without_staleness.folder, synchronous.folder)
    assert versions(without_staleness) == [{0}, {1}, {2}, {3}]
    kept = KeepsWeights()
    first = fitted(tiny_model, engine, 1, callbacks=[kept])
    again = fitted(tiny_model, engine, 1)
    assert_logprobs_of_named_versions(first, kept, tiny_model)
    assert versions(first) == [{0}, {0}, {1}, {2}]
    assert_equal_weights(first.folder, again.folder)
    with pytest.raises(AssertionError):
        assert_equal_weights(first.folder, synchronous.folder)
    name = engine if engine != "own" else OwnEngine(tiny_model)
    trainer = AsyncGRPOTrainer.from_pretrained("unused", asynchronous={}, **settings_of(name))
    replay(trainer, first, first.folder / "rollouts", tmp_path / "work")
    assert_equal_weights(tmp_path / "work", first.folder)
    # An engine that returns texts has no logprobs to compare.
    proven = [
        step["handover_mult_prob_error"] < 1.001 for step in first.metrics[1:] if is_proven(step)
    ]
    assert proven == [True] * (NUM_STEPS - 1 if engine != "of_texts" else 0)
    assert not is_proven(first.metrics[0])


def test_a_lost_backend_gets_the_current_weights_and_samples_again(
    session: ClusterSession, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = AsyncGRPOTrainer._begin_batches

    def kill_and_begin(trainer: Any, stream: Any) -> None:
        if trainer.step == 2:  # the thread then cannot sample the third step
            os.kill(worker_pid(trainer.sampler.generation), signal.SIGKILL)
        begin(trainer, stream)

    monkeypatch.setattr(AsyncGRPOTrainer, "_begin_batches", kill_and_begin)
    result = fitted(tiny_model, "custom", 1)
    assert versions(result) == [{0}, {0}, {2}, {2}]
    assert sum(step["num_engine_restarts"] for step in result.metrics) == 1
    assert [is_proven(step) for step in result.metrics] == [False, True, False, True]
