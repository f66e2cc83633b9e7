"""Which steps a run prints, and what their lines say."""

import io
import time

import pytest

from nemo_rl_core.telemetry.display import PlainDisplay
from nemo_rl_core.telemetry.display_lines import VERBOSE
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.types import StepReport


def printed(display: PlainDisplay, stream: io.StringIO) -> list[str]:
    display.close()
    return [line.split()[1] for line in stream.getvalue().splitlines() if "/" in line]


def step(number: int, num_steps: int, **metrics: float) -> StepReport:
    return StepReport("grpo", number, num_steps, {"reward": 0.5, **metrics})


def test_quick_steps_are_printed_every_5_percent() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for number in range(1, 101):
        display.step(step(number, 100))
    # The first, then every fifth after it, and the last.
    assert printed(display, stream) == [f"{n}/100" for n in (*range(1, 100, 5), 100)]


def test_slow_steps_are_printed_every_10_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for number in range(1, 10):  # 4 s each: the third after a printed one is 12 s later
        display.step(step(number, 1000))
        now[0] += 4
    assert printed(display, stream) == ["1/1000", "4/1000", "7/1000"]


def test_the_last_step_before_an_end_or_a_warning_is_printed() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for number in (1, 2, 3):
        display.step(step(number, 1000))
    display.note("a warning")
    display.step(step(4, 1000))
    display.stage_finished(StageRecord("grpo", "failed", 1.0))
    display.close()
    assert stream.getvalue().splitlines() == [
        "grpo 1/1000  reward 0.500",
        "grpo 3/1000  reward 0.500  0:00 left",
        "a warning",
        "grpo 4/1000  reward 0.500  0:00 left",
        "grpo  FAILED  1.0 s",
    ]


def test_verbose_lines_have_more_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERBOSE, "1")
    stream = io.StringIO()
    display = PlainDisplay(stream)
    metrics = {
        "kl": 0.0125, "completion_length": 5.5, "approx_entropy": 2.5,
        "truncated_fraction": 0.25, "grad_norm": 0.75, "zero_variance_fraction": 0.5,
    }  # fmt: skip
    display.step(step(1, 9, **metrics))
    display.close()
    assert stream.getvalue() == (
        "grpo 1/9  reward 0.500  KL 0.0125  length 5.5  entropy 2.5  truncated 25 %  "
        "grad norm 0.75  equal groups 50 %\n"
    )
