"""The loop of all trainers: counting, saving, resuming and finishing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.checkpoints import stop_request
from nemo_rl_core.config.trainer import KeepBest
from nemo_rl_core.trainers.loop import StepLoop, StepRange
from tests.training import CountingPolicy

FIVE_STEPS = StepRange(1, 5)


def make_loop(work: Path, *, steps: StepRange = FIVE_STEPS, save_every: int = 2) -> StepLoop:
    return StepLoop(work, stage="count", steps=steps, save_every_num_steps=save_every)


def run(loop: StepLoop, policy: CountingPolicy, *, until: int = 10**9) -> list[int]:
    """Runs steps, dies after step `until`, and returns the steps that were run."""
    done = []
    for step in loop.steps(policy):
        if step > until:
            break
        policy.value += 1
        loop.report(step, {"num_valid_tokens": 10.0, "value": float(policy.value)}, {"train": 2.0})
        done.append(step)
    return done


def lines(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def test_all_steps_run_and_the_last_is_saved(tmp_path: Path) -> None:
    loop, policy = make_loop(tmp_path), CountingPolicy()
    assert run(loop, policy) == [1, 2, 3, 4, 5]
    result = loop.finish(peak_memory_gib=1.5, choices={"training.attention": "flex"})
    assert result.made().choices == {"training.attention": "flex"}
    assert make_loop(tmp_path).finish(choices={"training.attention": "sdpa"}) == result
    assert (result.step, result.num_tokens, result.peak_memory_gib) == (5, 50, 1.5)
    assert json.loads((tmp_path / "model" / "value.json").read_text()) == 5
    assert json.loads((tmp_path / "trainer" / "value.json").read_text()) == 5
    assert not (tmp_path / "checkpoints").exists()


def test_a_report_counts_within_the_stage_and_over_the_run(tmp_path: Path) -> None:
    run(make_loop(tmp_path, steps=StepRange(11, 12)), CountingPolicy())
    first, second = lines(tmp_path)
    assert (first["step"], second["step"], first["num_steps"]) == (1, 2, 2)
    assert (first["metrics"]["global_step"], second["metrics"]["global_step"]) == (11.0, 12.0)
    # 10 tokens in 2 seconds.
    assert first["timings"] == {"train": 2.0, "tokens_per_second": 5.0}


@pytest.mark.parametrize(
    ("killed_after", "resumed_steps"),
    [(0, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5]), (2, [3, 4, 5]), (3, [3, 4, 5]), (4, [5]), (5, [])],
)
def test_a_killed_loop_resumes_from_its_last_save(
    tmp_path: Path, killed_after: int, resumed_steps: list[int]
) -> None:
    assert len(run(make_loop(tmp_path), CountingPolicy(), until=killed_after)) == killed_after
    policy = CountingPolicy()
    loop = make_loop(tmp_path)
    assert run(loop, policy) == resumed_steps
    assert policy.value == 5
    # Steps that the killed attempt reported after its last save are not repeated.
    assert [line["metrics"]["value"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert loop.finish().num_tokens == 50


def run_until_stopped(loop: StepLoop, policy: CountingPolicy, *, at: int) -> list[int]:
    """Returns the steps that were run if a callback stops the loop in step `at`."""
    done = []
    for step in loop.steps(policy):
        policy.value += 1
        loop.report(step, {"value": float(policy.value)}, {"train": 1.0})
        if step == at:
            loop.stop(step, "enough")
        done.append(step)
    return done


def test_a_stopped_loop_saves_its_step_and_has_a_result(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    assert run_until_stopped(loop, CountingPolicy(), at=3) == [1, 2, 3]
    assert [each["value"] for each in loop.history] == [1.0, 2.0, 3.0]
    result = loop.finish()
    assert (result.step, result.stopped) == (3, "stopped at step 3 of 5: enough")
    assert result.made().choices == {"stopped": result.stopped}
    assert json.loads((tmp_path / "model" / "value.json").read_text()) == 3
    assert make_loop(tmp_path).finish() == result  # killed within finish


def test_a_stopped_and_killed_loop_remains_stopped(tmp_path: Path) -> None:
    """A kill after the save of the last step, when no callback is called again."""
    run_until_stopped(make_loop(tmp_path), CountingPolicy(), at=3)
    loop = make_loop(tmp_path)
    assert run_until_stopped(loop, CountingPolicy(), at=3) == []
    assert loop.finish().step == 3


def test_a_loop_that_was_killed_before_its_last_save_stops_again(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    steps = loop.steps(policy := CountingPolicy())
    for step in steps:
        policy.value += 1
        loop.report(step, {"value": float(policy.value)}, {})
        if step == 3:
            loop.stop(step, "enough")
            break  # killed: the step is not saved
    steps.close()
    loop = make_loop(tmp_path)
    assert run_until_stopped(loop, CountingPolicy(), at=4) == [3, 4]
    assert loop.finish().step == 4


def run_until_asked(loop: StepLoop, policy: CountingPolicy, *, asked_in: int) -> None:
    for step in loop.steps(policy):
        policy.value += 1
        loop.report(step, {"value": float(policy.value)}, {"train": 1.0})
        if step == asked_in:
            assert stop_request.ask()


@pytest.mark.parametrize("writer", [CountingPolicy, lambda: SlowWriter(num_polls=3)])
def test_a_stop_request_ends_the_loop_after_a_save(
    tmp_path: Path, writer: Callable[[], CountingPolicy]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_until_asked(make_loop(tmp_path, save_every=5), writer(), asked_in=3)
    assert not stop_request.is_asked(), "a request ends with the loop that it was for"
    assert not stop_request.ask(), "and without a loop nobody is asked"
    policy = CountingPolicy()
    assert run(make_loop(tmp_path, save_every=5), policy) == [4, 5]
    assert policy.value == 5


def test_a_stop_request_in_the_last_step_ends_normally(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    run_until_asked(loop, CountingPolicy(), asked_in=5)
    assert loop.finish().step == 5


def test_saves_are_counted_from_the_first_step_of_the_stage(tmp_path: Path) -> None:
    # Steps 6 to 9, a save after every third: after 8, and after 9, the last.
    steps = StepRange(6, 9)
    run(make_loop(tmp_path, steps=steps, save_every=3), CountingPolicy(), until=8)
    assert run(make_loop(tmp_path, steps=steps, save_every=3), CountingPolicy()) == [9]


@pytest.mark.parametrize("moved", [[], ["trainer"], ["trainer", "model"]])
def test_a_kill_during_finish_is_recovered(tmp_path: Path, moved: list[str]) -> None:
    loop = make_loop(tmp_path)
    run(loop, CountingPolicy())
    assert not loop.is_finished
    # The steps of `finish` up to the kill.
    (tmp_path / "finished.json").write_text(json.dumps({"peak_memory_gib": 2.5}))
    (checkpoint,) = [p for p in (tmp_path / "checkpoints").iterdir() if (p / "model").is_dir()]
    for part in moved:
        (checkpoint / part).rename(tmp_path / part)
    again = make_loop(tmp_path)
    assert again.is_finished
    result = again.finish(peak_memory_gib=99.0)
    assert (result.peak_memory_gib, result.choices) == (2.5, {})
    assert {path.name for path in tmp_path.iterdir()} == {
        "model",
        "trainer",
        "metrics.jsonl",
        "finished.json",
    }
    assert again.finish() == result


class SlowWriter(CountingPolicy):
    """A policy whose checkpoint is written some steps after its start."""

    def __init__(self, num_polls: int) -> None:
        super().__init__()
        self.num_polls = num_polls

    def start_checkpoint(self, path: Path) -> None:
        self.begun, self.polls_left = (path, self.value), self.num_polls

    def checkpoint_is_written(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def finish_checkpoint(self) -> None:
        (path, value), now = self.begun, self.value
        self.value = value
        self.save_checkpoint(path)
        self.value = now


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    loop, policy, saved = make_loop(tmp_path, save_every=2), SlowWriter(num_polls=2), []
    seen = {}
    for step in loop.steps(policy, on_save=lambda step, folder: saved.append((step, folder.name))):
        seen[step] = [number for number, _ in saved]
        policy.value += 1
        loop.report(step, {}, {"train": 1.0})
    # Started after step 2, polled then and after step 3, and waited for before step 4.
    assert seen == {1: [], 2: [], 3: [], 4: [], 5: [2]}
    assert saved == [(number, f"step-{number:08d}") for number in (2, 4, 5)]
    resumed = SlowWriter(0)
    assert run(make_loop(tmp_path), resumed) == []
    assert resumed.value == 5


def test_other_files_of_a_step_are_written_before_its_save(tmp_path: Path) -> None:
    loop, policy = make_loop(tmp_path, save_every=2), SlowWriter(num_polls=0)
    seen: list[list[str]] = []

    def before_save() -> None:
        seen.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("*")))

    for step in loop.steps(policy, before_save=before_save):
        policy.value += 1
        loop.report(step, {}, {"train": 1.0})
    before_2, before_4, before_5 = seen
    assert not any("2" in name for name in before_2)
    assert not any("4" in name for name in before_4)
    assert not any("5" in name for name in before_5)


def test_a_checkpoint_that_is_being_written_is_finished_when_a_step_fails(tmp_path: Path) -> None:
    policy = SlowWriter(100)
    assert run(make_loop(tmp_path), policy, until=3) == [1, 2, 3]
    resumed = SlowWriter(0)
    assert run(make_loop(tmp_path), resumed) == [3, 4, 5]
    assert resumed.value == 5


@pytest.mark.parametrize(("best_step", "values"), [(2, [0, 9, 0, 1, 2]), (5, [0, 1, 0, 1, 2])])
def test_the_best_model_is_kept_in_addition_to_the_last(
    tmp_path: Path, best_step: int, values: list[int]
) -> None:
    keep = KeepBest(metric="score", mode="max")

    def loop() -> StepLoop:
        return StepLoop(
            tmp_path, stage="s", steps=FIVE_STEPS, save_every_num_steps=1, keep_best=keep
        )

    policy, first = CountingPolicy(), loop()
    for step in first.steps(policy):
        policy.value += 1
        first.report(step, {"score": float(values[step - 1])}, {"train": 1.0})
    first.finish()
    assert loop().finish().step == 5  # again, like after a kill
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": best_step}
    assert json.loads((tmp_path / "model" / "value.json").read_text()) == 5
    assert (tmp_path / "best").exists() == (best_step != 5)
    if best_step != 5:
        assert json.loads((tmp_path / "best" / "value.json").read_text()) == best_step
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "mode", "best_step"),
    [([0, 9, 0, 1, 2], "max", 2), ([5, 9, 1, 3, 2], "min", 3), ([0, 1, 0, 1, 2], "max", 5)],
)
@pytest.mark.parametrize("killed_after", [None, 1, 3, 4])
def test_the_best_model_is_the_result_if_requested(
    tmp_path: Path, values: list[int], mode: str, best_step: int, killed_after: int | None
) -> None:
    keep = KeepBest.model_validate({"metric": "score", "mode": mode, "result": "best"})

    def attempt(until: int = 5) -> StepLoop:
        loop = StepLoop(
            tmp_path, stage="s", steps=FIVE_STEPS, save_every_num_steps=1, keep_best=keep
        )
        policy = CountingPolicy()
        for step in loop.steps(policy):
            if step > until:
                break
            policy.value += 1
            loop.report(step, {"score": float(values[step - 1])}, {"train": 1.0})
        return loop

    if killed_after is not None:
        attempt(killed_after)
    result = attempt().finish()
    assert result.step == best_step
    for part in ("model", "trainer"):
        assert json.loads((tmp_path / part / "value.json").read_text()) == best_step
    assert not (tmp_path / "best").exists()
    assert not (tmp_path / "checkpoints").exists()
    # The metrics are of all steps; the result has the step of its model.
    assert len(lines(tmp_path)) == 5
    made = result.made(summary="loss 2 → 1")
    score = values[best_step - 1]
    assert made.step == best_step
    assert made.choices["keep_best"] == f"step {best_step} of 5, score {score}"
    assert made.summary == f"loss 2 → 1, model of step {best_step} of 5, score {score}"


@pytest.mark.parametrize("moved", [[], ["trainer"], ["trainer", "model"]])
def test_a_kill_while_moving_the_best_model_keeps_the_choice(
    tmp_path: Path, moved: list[str]
) -> None:
    keep = KeepBest(metric="value", mode="min", result="best")

    def loop() -> StepLoop:
        return StepLoop(
            tmp_path, stage="s", steps=FIVE_STEPS, save_every_num_steps=1, keep_best=keep
        )

    run(loop(), CountingPolicy())
    (tmp_path / "finished.json").write_text(json.dumps({"peak_memory_gib": 2.5}))
    (tmp_path / "best.json").write_text(json.dumps({"step": 1}))
    for part in moved:
        (tmp_path / "checkpoints" / "step-00000001" / part).rename(tmp_path / part)
    assert loop().finish().step == 1
    assert json.loads((tmp_path / "model" / "value.json").read_text()) == 1
    assert json.loads((tmp_path / "trainer" / "value.json").read_text()) == 1


def test_a_missing_metric_of_keep_best_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = KeepBest(metric="scroe", mode="max", result="best")
    loop = StepLoop(tmp_path, stage="s", steps=FIVE_STEPS, save_every_num_steps=1, keep_best=keep)
    run(loop, CountingPolicy())
    assert caplog.text.count("without the metric 'scroe' of keep_best") == 1
    assert "num_valid_tokens, value" in caplog.text
    assert loop.finish().step == 5


class ShardsWriter(SlowWriter):
    """A policy that records which of its checkpoints have no model."""

    def __init__(self) -> None:
        super().__init__(0)
        self.of_shards: list[int] = []

    def start_sharded_checkpoint(self, path: Path) -> None:
        self.start_checkpoint(path)
        self.of_shards.append(self.value)


def test_only_the_last_checkpoint_has_a_model(tmp_path: Path) -> None:
    policy = ShardsWriter()
    run(make_loop(tmp_path, save_every=1), policy)
    assert policy.of_shards == [1, 2, 3, 4]


def test_every_checkpoint_has_a_model_if_a_callback_uses_it(tmp_path: Path) -> None:
    policy, told = ShardsWriter(), []
    loop = make_loop(tmp_path)
    for step in loop.steps(policy, on_save=lambda step, _: told.append(step)):
        policy.value += 1
        loop.report(step, {}, {"train": 1.0})
    assert (policy.of_shards, told) == ([], [2, 4, 5])


def test_checkpoints_that_are_the_best_so_far_have_a_model(tmp_path: Path) -> None:
    policy, keep = ShardsWriter(), KeepBest(metric="score", mode="max")
    loop = StepLoop(tmp_path, stage="s", steps=FIVE_STEPS, save_every_num_steps=1, keep_best=keep)
    scores = [1.0, 3.0, 2.0, float("nan"), 0.0]
    for step in loop.steps(policy):
        policy.value += 1
        loop.report(step, {"score": scores[step - 1]}, {"train": 1.0})
    assert policy.of_shards == [3, 4]
    loop.finish()
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2}
    assert json.loads((tmp_path / "best" / "value.json").read_text()) == 2
