"""Asynchronous GRPO with custom engines and backends, and training in real workers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import AsyncGRPOTrainer, Callback, GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.ray.ahead import COMMON, NUM_STEPS, ROWS, worker_pid
from tests.ray.test_custom_backends import (
    OwnEngine,
    registered,  # noqa: F401 (a fixture)
)
from tests.training import assert_equal_weights, replay

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
    kind = GRPOTrainer if max_staleness is None else AsyncGRPOTrainer
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = kind.from_pretrained(model, asynchronous=ahead, **settings_of(named))
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


@pytest.mark.parametrize("engine", ["own", "custom", "of_texts", "hf"])
def test_weights_are_those_of_synchronous_training_or_of_older_samples(
    session: ClusterSession, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    by_turns, in_step = fitted(tiny_model, engine), fitted(tiny_model, engine, 0)
    assert_equal_weights(in_step.folder, by_turns.folder)
    assert versions(in_step) == [{0}, {1}, {2}, {3}]
    first, again = fitted(tiny_model, engine, 1), fitted(tiny_model, engine, 1)
    assert versions(first) == [{0}, {0}, {1}, {2}]
    assert_equal_weights(first.folder, again.folder)
    with pytest.raises(AssertionError):
        assert_equal_weights(first.folder, by_turns.folder)
    name = engine if engine != "own" else OwnEngine(tiny_model)
    ahead = {"asynchronous": {"max_staleness": 1}}
    trainer = AsyncGRPOTrainer.from_pretrained("unused", **ahead, **settings_of(name))
    replay(trainer, first, first.folder / "rollouts", tmp_path / "work")
    assert_equal_weights(tmp_path / "work", first.folder)
    for step in first.metrics:
        # An engine that returns texts has no logprobs to compare.
        assert step.get("handover_mult_prob_error", 1.0) < 1.001
        assert ("handover_mult_prob_error" in step) == (engine != "of_texts")


class Kills(Callback):
    """Kills the engine in the second step, while it samples the third."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 2:
            os.kill(worker_pid(trainer.sampler.generation), signal.SIGKILL)


def test_a_lost_backend_gets_the_current_weights_and_samples_again(
    session: ClusterSession, tiny_model: Path
) -> None:
    result = fitted(tiny_model, "custom", 1, callbacks=[Kills()])
    # The third step was being sampled with version 1, or was complete.
    assert versions(result)[2] in ({1}, {2})
    assert sum(step["num_engine_restarts"] for step in result.metrics) == 1
    assert all(step["handover_mult_prob_error"] < 1.001 for step in result.metrics)
