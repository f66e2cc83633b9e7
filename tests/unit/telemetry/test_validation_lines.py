"""The line of a validation, in a pipe, a terminal and a notebook."""

import io
import os
import pty
from contextlib import suppress

import pytest

from nemo_rl_core.telemetry.display import PlainDisplay, RichDisplay
from nemo_rl_core.telemetry.display_lines import validation_line
from nemo_rl_core.types import StepReport

LINE = "dpo_iteration 1 2/4  validation: loss 0.6931, accuracy 0.5"


def step(number: int, **validation: float) -> StepReport:
    figures = {f"validation_{name}": value for name, value in validation.items()}
    return StepReport("dpo_iteration 1", number, 4, {"loss": 0.7, **figures}, {})


def test_a_step_without_a_validation_has_no_line() -> None:
    assert validation_line(step(1)) == ""
    assert validation_line(step(2, loss=0.693147, accuracy=0.5)) == LINE


def test_a_pipe_has_a_line_for_each_validation() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for each in (step(1), step(2, loss=0.693147, accuracy=0.5), step(3), step(4, loss=0.25)):
        display.step(each)
    display.close()
    lines = [line for line in stream.getvalue().splitlines() if "validation" in line]
    assert lines == [LINE, "dpo_iteration 1 4/4  validation: loss 0.25"]
    assert stream.getvalue().splitlines()[1].startswith("dpo_iteration 1 2/4  loss 0.700")


def test_a_terminal_keeps_the_line_above_the_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        display = RichDisplay(stream)
        display.step(step(1))
        display.step(step(2, loss=0.693147, accuracy=0.5))
        display.close()
    written = b""
    with suppress(OSError):  # the end of a terminal is an error
        while part := os.read(reader, 65536):
            written += part
    os.close(reader)
    shown = written.decode()
    assert f"{LINE}\r\n" in shown
    assert shown.count("validation:") == 1
