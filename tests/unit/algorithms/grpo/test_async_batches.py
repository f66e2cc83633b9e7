"""Asynchronous GRPO with a custom policy, and with engines that complete one batch at a time."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core import AsyncGRPOTrainer, DistillationTrainer, GRPOTrainer
from nemo_rl_core.algorithms.grpo import asynchronous
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import ConfigError, ConsistencyError, WorkerLostError
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts.batch_stream import BatchStream
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Rollout
from tests.training import replay
from tests.unit.trainers.test_own_policy import (
    ROLLOUTS,
    ROWS,
    CustomGeneration,
    CustomPolicy,
    Student,
    _tables_as_before,  # noqa: F401 (a fixture)
)

NUM_STEPS = 4
SETTINGS: dict[str, Any] = {
    **ROLLOUTS,
    "num_steps_per_iteration": NUM_STEPS,
    "loss": {"kl": None, "importance": {"kind": "truncated"}},
}


class Learner(CustomPolicy):
    """The policy of document 004, with a larger step and its weights as a state dict."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self._optimizer.param_groups[0]["lr"] = 0.02

    def state_dict(self) -> Any:
        return self.model.state_dict()


class Updated(CustomGeneration):
    """The engine of document 004 with a copy of the model, which takes new weights."""

    def __init__(self, policy: Learner) -> None:
        super().__init__(copy.deepcopy(policy.model))

    def update_weights(self, state_dict: Any) -> None:
        self.model.load_state_dict(state_dict)


def shared(policy: Learner) -> CustomGeneration:
    """Returns an engine that samples with the policy's model."""
    return CustomGeneration(policy.model)


def trained(
    model: Path, engine_of: Any, max_staleness: int | None = None, **settings: Any
) -> tuple[Learner, TrainResult]:
    policy = Learner(str(model))
    if engine_of is not None:
        settings |= {"generation": engine_of(policy), "max_new_tokens": 1}
    kind = GRPOTrainer if max_staleness is None else AsyncGRPOTrainer
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    reward = settings.pop("reward_fn", lambda prompt, text: float(sum(map(ord, text))))
    trainer = kind(policy, asynchronous=ahead, **{**SETTINGS, **settings})
    return policy, trainer.fit(ROWS, reward_fn=reward)


def assert_equal(one: Learner, other: Learner) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def versions(result: TrainResult) -> list[set[int]]:
    """Returns the versions of the weights that sampled each step."""
    records = RolloutRecords(result.folder / "rollouts")
    return [
        {version for each in records.load(step) for version in each.completion.weight_versions}
        for step in range(1, NUM_STEPS + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine_of", [None, shared, Updated])
@pytest.mark.parametrize("sampling", [None, {"max_draws": 3}])
def test_without_staleness_a_custom_policy_is_trained_as_in_synchronous_training(
    tiny_model: Path, engine_of: Any, sampling: Any
) -> None:
    by_turns, _ = trained(tiny_model, engine_of, dynamic_sampling=sampling)
    in_step, result = trained(tiny_model, engine_of, 0, dynamic_sampling=sampling)
    assert not torch.equal(
        in_step.state_dict()["model.norm.weight"],
        Learner(str(tiny_model)).state_dict()["model.norm.weight"],
    )
    assert_equal(in_step, by_turns)
    assert versions(result) == [{0}, {1}, {2}, {3}]
    assert all(step["staleness_max"] == 0 for step in result.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("engine_of", [None, shared, Updated])
def test_a_custom_policy_trains_on_samples_as_old_as_allowed(
    tiny_model: Path, tmp_path: Path, engine_of: Any
) -> None:
    policy, result = trained(tiny_model, engine_of, 1)
    assert versions(result) == [{0}, {0}, {1}, {2}]
    assert [step["staleness"] for step in result.metrics] == [0, 1, 1, 1]
    again, _ = trained(tiny_model, engine_of, 1)
    assert_equal(again, policy)
    replayed = Learner(str(tiny_model))
    trainer = AsyncGRPOTrainer(replayed, asynchronous={"max_staleness": 1}, **SETTINGS)
    replay(trainer, result, result.folder / "rollouts", tmp_path / "work")
    assert_equal(replayed, policy)
    has_logprobs = engine_of is not None
    assert [("handover_mult_prob_error" in step) for step in result.metrics] == [has_logprobs] * 4
    # Only the first step has tokens of the current weights.
    assert [("token_mult_prob_error" in step) for step in result.metrics] == [
        has_logprobs,
        *[False] * 3,
    ]


@pytest.mark.slow
def test_an_engine_samples_in_a_thread_while_workers_train(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    class Recorded(Updated):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            threads.append(threading.current_thread().name)
            return super().generate(data, greedy)

    before, _ = trained(tiny_model, Recorded, 1)
    assert set(threads) == {"MainThread"}
    threads.clear()
    # As if the policy had workers; `tests/ray/test_custom_asynchronous.py` has real ones.
    monkeypatch.setattr(asynchronous, "Policy", CustomPolicyAdapter)
    policy, result = trained(tiny_model, Recorded, 1)
    assert threads.count("rollouts") == NUM_STEPS - 1
    assert versions(result) == [{0}, {0}, {1}, {2}]
    assert_equal(policy, before)


class Chat:
    """Answers `1=` once, and rewards digits."""

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        turns = [sum(each["role"] == "assistant" for each in log) for log in message_log_batch]
        texts = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([float(sum(map(ord, text)) % 7) for text in texts]),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"rows": float(len(batch["rewards"]))}


@pytest.mark.slow
def test_all_turns_of_a_step_are_sampled_with_the_same_weights(tiny_model: Path) -> None:
    games = {"rollouts": {"max_turns": 3, "max_rollout_tokens": 24}, "reward_fn": Chat()}
    by_turns, _ = trained(tiny_model, None, **games)
    in_step, _ = trained(tiny_model, None, 0, **games)
    assert_equal(in_step, by_turns)
    _, result = trained(tiny_model, None, 1, **games)
    assert versions(result) == [{0}, {0}, {1}, {2}]
    assert max(step["num_turns"] for step in result.metrics) == 2
    assert [step["environment_rows"] for step in result.metrics] == [6.0] * NUM_STEPS


SCRIPT = """
import sys
from nemo_rl_core import AsyncGRPOTrainer, Callback
from tests.unit.algorithms.grpo.test_async_batches import ROWS, SETTINGS, Learner


class Policy(Learner):
    def save_checkpoint(self, path):
        self.model.save_pretrained(path / "model")

    def load_checkpoint(self, path):
        self.__init__(str(path / "model"))


class Interrupts(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 2 and "interrupt" in sys.argv:
            raise SystemExit("interrupted")


if __name__ == "__main__":
    trainer = AsyncGRPOTrainer(
        Policy(sys.argv[1]), asynchronous={}, save_every_num_steps=1, **SETTINGS
    )
    result = trainer.fit(
        ROWS, reward_fn=lambda prompt, text: float(len(text)), name="mine", callbacks=[Interrupts()]
    )
    print(result.lineage_id, [step["staleness"] for step in result.metrics])
"""


@pytest.mark.thorough
def test_a_policy_of_a_script_resumes_and_is_cached_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(script), str(tiny_model), *arguments],
            env={
                **os.environ,
                "NEMO_RL_HOME": str(tmp_path / "store"),
                "PYTHONPATH": str(Path(__file__).parents[4]),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    interrupted, resumed, cached = run("interrupt"), run(), run()
    assert "interrupted" in interrupted.stderr
    # The second step was not saved, and is sampled again by the weights at its start.
    last = resumed.stdout.splitlines()[-1]
    assert last.endswith(" [0.0, 0.0, 1.0, 1.0]"), resumed.stderr[-2000:]
    assert cached.stdout.splitlines()[-1] == last
    assert "grpo_iteration" in resumed.stderr and "grpo_iteration" not in cached.stderr


@pytest.mark.slow
def test_an_engine_with_old_weights_is_refused_although_no_token_is_compared(
    tiny_model: Path,
) -> None:
    def never_updated(policy: Learner) -> CustomGeneration:
        return CustomGeneration(copy.deepcopy(policy.model))

    with pytest.raises(ConsistencyError, match="of fixed prompts, at the same weights"):
        trained(tiny_model, never_updated, 1)


@pytest.mark.slow
def test_distillation_samples_from_an_engine_as_long_as_it_agrees(tiny_model: Path) -> None:
    def losses(engine_of: Any) -> list[float]:
        student = Student(str(tiny_model))
        student._optimizer.param_groups[0]["lr"] = 0.02
        few = {name: value for name, value in ROLLOUTS.items() if name[:9] != "num_steps"}
        trainer = DistillationTrainer(
            student,
            generation=engine_of(student),
            **{**few, "max_new_tokens": 1},
            num_steps=4,
            distillation={"top_k": 3},
        )
        return [step["loss"] for step in trainer.fit(ROWS).metrics]

    by_engine = losses(shared)
    assert by_engine[-1] < 0.8 * by_engine[0]
    with pytest.raises(ConsistencyError, match="of fixed prompts, at the same weights"):
        losses(lambda student: CustomGeneration(copy.deepcopy(student.model)))


def test_steps_are_drawn_in_order_and_errors_raised_for_their_step() -> None:
    calls: list[Any] = []
    may_score = threading.Event()

    def roll_out(prompts: Any, *, step: int, first_group: int, while_training: bool) -> Any:
        calls.append((step, list(prompts), first_group, while_training))
        if step == 3:
            raise WorkerLostError("the engine is lost")
        return ["rollout"]

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> Any:
        may_score.wait(10)
        return ["c"] if calls[-1][1] == ["a", "b"] else None

    with BatchStream(roll_out, on_draw, nullcontext) as stream:
        stream.begin(["a", "b"], step=1, while_training=False)  # type: ignore[list-item]
        assert calls == [(1, ["a", "b"], 0, False)]  # sampled already, not scored
        stream.begin(["d"], step=2, while_training=True)  # type: ignore[list-item]
        stream.begin(["e"], step=3, while_training=True)  # type: ignore[list-item]
        assert len(calls) == 1
        may_score.set()
        stream.finish()
        assert calls[1:] == [(1, ["c"], 2, False), (2, ["d"], 0, True), (3, ["e"], 0, True)]
        stream.take(1)
        stream.take(2)
        with pytest.raises(WorkerLostError, match="the engine is lost"):
            stream.take(3)


def ahead(engine: Any, **generation: Any) -> AsyncGRPOTrainer:
    trainer = AsyncGRPOTrainer("m", asynchronous={})
    trainer._group_size, trainer.step = 2, 1
    trainer.sampler = SimpleNamespace(engine=engine, generation=SimpleNamespace(**generation))  # type: ignore[assignment]
    return trainer


def test_logprobs_of_some_steps_only_are_refused_while_the_policy_is_trained() -> None:
    generation = {"may_restart": True}

    def run(prompts: Any, **options: Any) -> Any:
        assert trainer.sampler is not None
        assert not trainer.sampler.generation.may_restart
        return ["rollout"]

    trainer = ahead(SimpleNamespace(run=run, has_logprobs=True), **generation)
    assert trainer.sampler is not None
    options: dict[str, Any] = {"step": 2, "first_group": 0, "while_training": True}
    assert trainer._roll_out_ahead([], **options) == ["rollout"]
    assert trainer.sampler.generation.may_restart
    trainer.sampler.engine.has_logprobs = False
    with pytest.raises(ConfigError, match="returned no logprobs for some completions of step 2"):
        trainer._roll_out_ahead([], **options)


def test_a_step_whose_engine_was_lost_is_sampled_again() -> None:
    trainer = ahead(None)
    error = WorkerLostError("the engine is lost")

    def take(step: int) -> None:
        if step == 1:
            raise error

    stream: Any = SimpleNamespace(take=take)
    trainer._sampled = {1: "one", 2: "two"}  # type: ignore[dict-item]
    assert trainer._finished_step(stream) is None
    trainer.step = 2
    assert trainer._finished_step(stream) == "two"
    assert trainer._sampled == {}
