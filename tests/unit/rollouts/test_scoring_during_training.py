"""Asynchronous GRPO scores during training, unless the scoring model is on the trainer's GPU."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Completion
from tests.waiting import Ahead, WaitingEngine, WaitingPolicy, WaitingStreamingSampler, run

NUM_STEPS = 6
Times = list[tuple[float, float]]


def overlaps(rewards: Times, steps: Times) -> int:
    return sum(
        begun < ended_step and begun_step < ended
        for begun, ended in rewards
        for begun_step, ended_step in steps
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_a_gpu", [False, True], ids=["anywhere", "on the trainer's GPU"])
def test_rewards_on_the_trainers_gpu_wait_for_the_trainer(
    on_a_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitingEngine, "seconds", 0.05)
    rewards: Times = []
    steps: Times = []
    released: list[float] = []

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        begun = time.monotonic()
        time.sleep(0.15)
        rewards.append((begun, time.monotonic()))
        return [float(index % 7) for index in range(len(responses))]

    class Timed(WaitingPolicy):
        def train(self, batch: Any, loss_fn: Any) -> dict[str, float]:
            begun = time.monotonic()
            time.sleep(0.3)
            steps.append((begun, time.monotonic()))
            return {"loss": 0.0, "num_valid_tokens": 1.0}

    class OnGpu(WaitingStreamingSampler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scores_on_a_gpu = on_a_gpu

    class Trainer(Ahead):
        sampler_class = OnGpu

        def _make_policy(self, spec: RunSpec) -> Any:
            return Timed()

        def _release_policy(self) -> None:
            released.append(time.monotonic())

    run(Trainer, tmp_path, reward, num_prompts=4, num_steps=NUM_STEPS)
    assert (len(rewards), len(steps)) == (NUM_STEPS, NUM_STEPS)
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(steps))
    if on_a_gpu:
        assert overlaps(rewards, steps) == 0
        # The check of each transfer loads weights back from the host.
        assert len(released) == NUM_STEPS
        assert all(
            began <= release for (began, _), release in zip(steps, released[1:], strict=False)
        )
        # Since the last step that was trained; on a busy machine, the next step's rewards may
        # follow at once, before the trainer has its GPU back.
        for began, _ in rewards:
            since = max((ended for _, ended in steps if ended <= began), default=0.0)
            assert any(since <= release <= began for release in released)
    else:
        assert overlaps(rewards, steps) >= NUM_STEPS // 2


@pytest.mark.slow
def test_the_next_steps_completions_are_polled_before_the_engine_gets_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_core.rollouts.stream._DRAW_POLL_SECONDS", 1000.0)
    monkeypatch.setattr(WaitingEngine, "seconds", 0.05)
    monkeypatch.setattr(WaitingPolicy, "seconds", 0.3)
    events: list[str] = []

    class Noted(WaitingEngine):
        def update_weights(self, policy: Any, **options: Any) -> None:
            events.append("weights")
            super().update_weights(policy, **options)

        def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
            finished = super().poll(wait_seconds=wait_seconds)
            events.extend(["completions"] if finished else [])
            return finished

    class WithNotes(WaitingStreamingSampler):
        _engine_class = Noted

    class Trainer(Ahead):
        sampler_class = WithNotes

    run(Trainer, tmp_path, lambda _, responses: [0.0] * len(responses), num_prompts=4, num_steps=6)
    # Completions of the first step come once the trainer waits; those of each later step while the
    # step before is recorded.
    of_later = events[events.index("completions") + 1 :]
    assert of_later.count("weights") == NUM_STEPS - 1
    pairs = [tuple(of_later[index : index + 2]) for index in range(0, len(of_later), 2)]
    assert pairs.count(("completions", "weights")) >= NUM_STEPS // 2, events


def test_awaited_completions_may_finish_before_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (WaitingEngine, WaitingPolicy):
        monkeypatch.setattr(kind, "seconds", 0.01)
    calls: list[str] = []

    class Noted(WaitingEngine):
        def finish_first(self, priority: int) -> None:
            calls.append(f"finish step {priority}")

        def update_weights(self, policy: Any, *, weight_version: int = 0, **options: Any) -> None:
            calls.append(f"weights {weight_version}")
            super().update_weights(policy, weight_version=weight_version, **options)

    class WithNotes(WaitingStreamingSampler):
        _engine_class = Noted

    class Trainer(Ahead):
        sampler_class = WithNotes

    run(Trainer, tmp_path, lambda _, responses: [0.0] * len(responses), num_prompts=4, num_steps=3)
    # No request runs before the first step.
    expected = ["weights 0", "finish step 2", "weights 1", "finish step 3", "weights 2"]
    assert calls == expected
