"""Asynchronous GRPO with a custom policy, and with engines that complete one batch at a time."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core import AsyncGRPOTrainer, Callback, DistillationTrainer, GRPOTrainer
from nemo_rl_core.algorithms.grpo import asynchronous
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import ConfigError, ConsistencyError, WorkerLostError
from nemo_rl_core.models.generation.custom import CustomEngineAdapter
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts import batch_stream
from nemo_rl_core.rollouts.batch_stream import BatchStream
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.telemetry.usage import Timer
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Rollout
from tests.training import KeepsWeights, assert_logprobs_of_named_versions, replay
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
    model: Path,
    engine_of: Any,
    max_staleness: int | None = None,
    *,
    policy_class: type[Learner] = Learner,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> tuple[Learner, TrainResult]:
    policy = policy_class(str(model))
    if engine_of is not None:
        settings |= {"generation": engine_of(policy), "max_new_tokens": 1}
    trainer_class = GRPOTrainer if max_staleness is None else AsyncGRPOTrainer
    asynchronous = None if max_staleness is None else {"max_staleness": max_staleness}
    reward = settings.pop("reward_fn", lambda prompt, text: float(sum(map(ord, text))))
    trainer = trainer_class(policy, asynchronous=asynchronous, **{**SETTINGS, **settings})
    return policy, trainer.fit(ROWS, reward_fn=reward, callbacks=callbacks)


@pytest.fixture
def engines_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets custom engines sample during training; `tests/ray` has real workers."""
    monkeypatch.setattr(asynchronous, "Generation", CustomEngineAdapter)


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


def checks(result: TrainResult) -> list[str]:
    """Returns what compared the engine with the policy in each step."""
    names = {"token_mult_prob_error": "gate", "handover_mult_prob_error": "proof"}
    return [
        " ".join(each for name, each in names.items() if name in step) for step in result.metrics
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine_of", [None, shared, Updated])
@pytest.mark.parametrize("sampling", [None, {"max_draws": 3}])
def test_without_staleness_a_custom_policy_is_trained_as_in_synchronous_training(
    tiny_model: Path, engine_of: Any, sampling: Any
) -> None:
    synchronous, _ = trained(tiny_model, engine_of, dynamic_sampling=sampling)
    without_staleness, result = trained(tiny_model, engine_of, 0, dynamic_sampling=sampling)
    assert not torch.equal(
        without_staleness.state_dict()["model.norm.weight"],
        Learner(str(tiny_model)).state_dict()["model.norm.weight"],
    )
    assert_equal(without_staleness, synchronous)
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
    assert checks(result) == (["gate", *["proof"] * 3] if engine_of is not None else [""] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_policy_that_samples_is_not_compared_with_itself(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    calls, phases = [0], []

    class Counted(Learner):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            calls[0] += 1
            return super().generate(data, greedy)

    @contextmanager
    def phase(self: Timer, name: str) -> Iterator[None]:
        assert not phases, f"{name} is part of {phases}, so the phases exceed the step"
        phases.append(name)
        yield
        phases.pop()

    monkeypatch.setattr(Timer, "phase", phase)
    trained(tiny_model, None, policy_class=Counted)
    num_calls, calls[0] = calls[0], 0
    trained(tiny_model, None, max_staleness, policy_class=Counted)
    assert calls[0] == num_calls


@pytest.mark.slow
def test_a_custom_engine_samples_before_training_and_an_engine_with_workers_meanwhile(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    trains = threading.Event()

    class Recorded(Updated):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            threads.append(threading.current_thread().name)
            if threads[-1] == "rollouts":
                assert trains.wait(30), "the step is not trained before the next one is sampled"
                trains.clear()
            return super().generate(data, greedy)

    class Signals(Learner):
        def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
            trains.set()
            return super().train(data, loss_fn)

    # The thread would disturb the random numbers of this process, also if the policy has workers.
    monkeypatch.setattr(asynchronous, "Policy", CustomPolicyAdapter)
    before, _ = trained(tiny_model, Recorded, 1, policy_class=Signals)
    assert set(threads) == {"MainThread"}
    threads.clear()
    trains.clear()
    monkeypatch.setattr(asynchronous, "Generation", CustomEngineAdapter)
    policy, result = trained(tiny_model, Recorded, 1, policy_class=Signals)
    assert threads.count("rollouts") == NUM_STEPS - 1
    assert versions(result) == [{0}, {0}, {1}, {2}]
    assert_equal(policy, before)


@pytest.mark.slow
@pytest.mark.parametrize("has_workers", [False, True])
def test_logprobs_are_those_of_the_weights_that_their_version_names(
    tiny_model: Path, request: pytest.FixtureRequest, has_workers: bool
) -> None:
    if has_workers:
        request.getfixturevalue("engines_with_workers")
    kept = KeepsWeights()
    _, result = trained(tiny_model, Updated, 1, callbacks=[kept])
    assert_logprobs_of_named_versions(result, kept, tiny_model)


class Sleeps(Updated):
    """Generates only while it is awake."""

    is_awake = False

    def prepare_for_generation(self) -> None:
        self.is_awake = True

    def finish_generation(self) -> None:
        self.is_awake = False

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        assert self.is_awake
        return super().generate(data, greedy)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 0, 1])
def test_an_engine_is_awake_in_its_proof_and_asleep_in_training(
    tiny_model: Path, max_staleness: int | None
) -> None:
    engines: list[Sleeps] = []
    is_awake: list[bool] = []

    class Watches(Learner):
        def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
            is_awake.append(engines[-1].is_awake)
            return super().train(data, loss_fn)

    def engine_of(policy: Learner) -> Sleeps:
        engines.append(Sleeps(policy))
        return engines[-1]

    _, result = trained(tiny_model, engine_of, max_staleness, policy_class=Watches)
    assert is_awake == [False] * NUM_STEPS
    assert checks(result)[1:] == ["proof" if max_staleness else "gate"] * 3


@pytest.mark.slow
def test_a_replay_does_not_report_the_proof_of_an_earlier_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = Learner(str(tiny_model))
    settings = {**SETTINGS, "generation": Updated(policy), "max_new_tokens": 1}
    trainer = AsyncGRPOTrainer(policy, asynchronous={"max_staleness": 1}, **settings)
    result = trainer.fit(ROWS, reward_fn=lambda prompt, text: float(sum(map(ord, text))))
    policy.__init__(str(tiny_model))  # type: ignore[misc]
    replayed = replay(trainer, result, result.folder / "rollouts", tmp_path / "work")
    assert not [step for step in replayed if "handover_mult_prob_error" in step]


@pytest.mark.slow
def test_a_step_whose_engine_is_lost_during_training_is_sampled_again(
    tiny_model: Path, engines_with_workers: None
) -> None:
    may_restart: list[bool] = []
    trainers: list[Any] = []

    class LostOnce(Updated):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            if threading.current_thread().name == "rollouts":
                may_restart.append(trainers[0].sampler.generation.may_restart)
                if len(may_restart) == 2:
                    raise WorkerLostError("the engine is lost")
            return super().generate(data, greedy)

    class Watch(Callback):
        def on_fit_begin(self, trainer: Any) -> None:
            trainers.append(trainer)

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            trainer._stream.finish()
            assert trainer.sampler.generation.may_restart

    _, result = trained(tiny_model, LostOnce, 1, callbacks=[Watch()])
    assert may_restart == [False] * 3  # for steps 2, 3 and 4
    assert versions(result) == [{0}, {0}, {2}, {2}]
    assert checks(result) == ["gate", "proof", "gate", "proof"]


def test_an_engine_is_not_restarted_while_the_policy_is_trained() -> None:
    engine = Generation.__new__(Generation)
    engine.may_restart = False
    calls: list[Any] = []

    def call() -> None:
        calls.append(engine)
        raise WorkerLostError("the engine is lost")

    with pytest.raises(WorkerLostError, match="the engine is lost"):
        engine._with_restart(call)
    assert len(calls) == 1


class Chat:
    """Answers `1=` once, and rewards the sum of a turn's characters modulo 7."""

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
    synchronous, _ = trained(tiny_model, None, **games)
    without_staleness, _ = trained(tiny_model, None, 0, **games)
    assert_equal(without_staleness, synchronous)
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
    class WithState(Student):
        state_dict = Learner.state_dict

    def losses(engine_of: Any) -> list[float]:
        student = WithState(str(tiny_model))
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
    assert losses(Sleeps) == pytest.approx(by_engine, abs=1e-5)
    with pytest.raises(ConsistencyError, match="of fixed prompts, at the same weights"):
        losses(lambda student: CustomGeneration(copy.deepcopy(student.model)))


def test_distillation_refuses_a_student_that_cannot_check_its_engine(tiny_model: Path) -> None:
    class WithoutLogprobs(Student):
        get_logprobs = PolicyInterface.get_logprobs

    student = WithoutLogprobs(str(tiny_model))
    assert DistillationTrainer(student, max_new_tokens=1)  # samples itself
    with pytest.raises(ConfigError, match="WithoutLogprobs does not have") as refused:
        DistillationTrainer(student, generation=shared(student), max_new_tokens=1)  # type: ignore[arg-type]
    assert "get_logprobs(batch): logprobs of the student" in str(refused.value)


def test_a_draw_that_ends_after_the_run_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_stream, "CLOSE_SECONDS", 0.01)
    samples, is_closed = threading.Event(), threading.Event()
    scored: list[int] = []

    def roll_out(prompts: Any, **options: Any) -> Any:
        samples.set()
        is_closed.wait(10)
        return ["rollout"]

    with BatchStream(roll_out, lambda step, _: scored.append(step), nullcontext) as stream:
        stream.begin(["a"], step=1, while_training=True)  # type: ignore[list-item]
        assert samples.wait(10)
    is_closed.set()
    stream.take(1)
    assert scored == []


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


def test_logprobs_of_some_steps_only_are_refused_while_the_policy_is_trained() -> None:
    trainer = AsyncGRPOTrainer("m", asynchronous={})
    trainer._group_size = 2
    engine = SimpleNamespace(run=lambda prompts, **options: ["rollout"], has_logprobs=True)
    trainer.sampler = SimpleNamespace(engine=engine, generation=SimpleNamespace())  # type: ignore[assignment]
    options: dict[str, Any] = {"step": 2, "first_group": 0, "while_training": True}
    assert trainer._roll_out_ahead([], **options) == ["rollout"]
    engine.has_logprobs = False
    with pytest.raises(ConfigError, match="returned no logprobs for some completions of step 2"):
        trainer._roll_out_ahead([], **options)
