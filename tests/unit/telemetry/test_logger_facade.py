import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nemo_rl_core.telemetry import logger_facade as facade
from nemo_rl_core.telemetry.logger_facade import LoggerFacade, with_unique_names
from nemo_rl_core.telemetry.trackers import JsonLines


class Flaky:
    """A tracker that can fail, and can block until it is released."""

    def __init__(self) -> None:
        self.is_down = False
        self.down_at: tuple[int, ...] = ()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.taken: list[tuple[str, int, dict[str, float]]] = []

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self.may_answer.wait(30)
        if step in self.down_at:
            raise ConnectionError("no route")
        self.taken.append((stage, step, dict(metrics)))

    def close(self, outcome: str) -> None:
        if self.is_down:
            raise ConnectionError("no route")


def _until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_failing_tracker_stops_neither_training_nor_other_trackers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away, path = Flaky(), tmp_path / "in" / "metrics.jsonl"
    away.down_at = (1, 2)
    with LoggerFacade({"away": lambda: away, "jsonl": lambda: JsonLines(path)}) as log:
        log.log_metrics("sft", 1, {"loss": 0.5})
        log.log_metrics("sft", 2, {"loss": 0.25})
        log.log_metrics("sft", 3, {"loss": 0.125})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"stage": "sft", "step": step, "loss": 0.5**step} for step in (1, 2, 3)]
    assert away.taken == [("sft", 3, {"loss": 0.125})]
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [
        "away accepts no metrics since step 1 of sft; training continues: "
        "ConnectionError: no route",
        "away has lost 2 steps of this run",
    ]


def test_opening_a_tracker_is_retried_at_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: list[Flaky | Exception] = [ImportError("No module named 'wandb'"), Flaky()]
    last = answers[-1]

    def open_it() -> Flaky:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with LoggerFacade({"wandb": open_it}) as log:
        log.log_metrics("sft", 1, {"loss": 1.0})
        log.log_metrics("sft", 2, {"loss": 2.0})
    assert isinstance(last, Flaky)
    assert last.taken == [("sft", 2, {"loss": 2.0})]
    assert "No module named 'wandb'" in caplog.text


def test_a_blocking_tracker_delays_neither_steps_nor_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade, "MAX_WAITING", 5)
    hanging, well = Flaky(), Flaky()
    hanging.may_answer.clear()
    log = LoggerFacade({"hanging": lambda: hanging, "well": lambda: well}, close_seconds=0.3)
    started = time.monotonic()
    for step in range(8):
        log.log_metrics("grpo", step, {"reward": 0.0})
        _until(lambda step=step: len(well.taken) == step + 1, "the other one gets every step")
    log.close()
    assert time.monotonic() - started < 100
    assert [step for _, step, _ in well.taken] == list(range(8))
    assert "hanging accepts no metrics since step 6 of grpo" in caplog.text
    assert "hanging did not finish within 0.3 s of the end: 8 steps or more" in caplog.text
    hanging.may_answer.set()


def test_nothing_is_opened_for_a_run_without_steps() -> None:
    def refuse() -> Flaky:
        raise AssertionError("opened")

    with LoggerFacade({"x": refuse}):
        pass


def test_two_trackers_of_a_kind_get_different_names() -> None:
    first, second = Flaky(), Flaky()
    named = with_unique_names([("jsonl", lambda: first), ("jsonl", lambda: second)])
    assert list(named) == ["jsonl", "jsonl 2"]


def test_closing_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Flaky()
    with LoggerFacade({"x": lambda: tracker}) as log:
        log.log_metrics("sft", 1, {})
        _until(lambda: tracker.taken, "taken")
        tracker.is_down = True
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "x could not be closed: no route"
    ]
