"""Waits of a run: the events, and the lines of displays for them."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_rl_core.telemetry import display as displays
from nemo_rl_core.telemetry.console import console_on
from nemo_rl_core.telemetry.display import PlainDisplay
from nemo_rl_core.telemetry.display_lines import clock
from nemo_rl_core.telemetry.events import Event, StageRecord, Waiting, subscribe
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    events: list[Event] = []
    end = subscribe(events.append)
    yield events
    end()


def test_the_innermost_wait_is_shown_then_the_outer_one(seen: list[Event]) -> None:
    with waiting("loading"), waiting("hashing", total=8, unit="bytes") as wait:
        wait.advance(3)
        wait.advance(5)  # within a quarter of a second of the first: not published
    assert seen == [
        Waiting("loading"),
        Waiting("hashing", 0, 8, "bytes"),
        Waiting("hashing", 3, 8, "bytes"),
        Waiting("loading"),
        Waiting(""),
    ]


def test_a_wait_ends_with_an_error(seen: list[Event]) -> None:
    with pytest.raises(LookupError), waiting("loading"):
        raise LookupError
    assert seen[-1] == Waiting("")


def test_bytes_added_to_a_folder_are_counted(seen: list[Event], tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 1000)
    with waiting_for_files("downloading", tmp_path, tmp_path / "none"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "part").write_bytes(b"x" * 234)
        until(lambda: any(isinstance(each, Waiting) and each.done for each in seen))
    assert Waiting("downloading", 234, None, "bytes") in seen
    assert seen[-1] == Waiting("")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("wait", "shown"),
    [
        (Waiting("starting Ray"), "evaluate  0:00  starting Ray  0:00"),
        (Waiting("hashing", 3, 8, "files"), "evaluate  0:00  hashing  3 of 8 files  0:00"),
        (Waiting("fetching", 1.5e6, None, "bytes"), "evaluate  0:00  fetching  1.5 MB  0:00"),
        (
            Waiting("fetching", 5e8, 2.25e9, "bytes"),
            "evaluate  0:00  fetching  0.5 of 2.2 GB  0:00",
        ),
        (Waiting(""), "evaluate  0:00"),
    ],
)
def test_waits_are_printed_in_a_pipe(
    wait: Waiting, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displays, "_SECONDS_OF_SILENCE", (0.0, 1e9))
    monkeypatch.setattr(displays, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(displays, "_SECONDS_OF_A_WAIT", 0.0)
    if not wait.text:  # without a wait, a stage is named only after the longest silence
        monkeypatch.setattr(displays, "_SECONDS_OF_SILENCE", (0.0,))
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.stage_started("evaluate")
    display.waiting(wait)
    until(lambda: stream.getvalue().count("\n") > 1)
    display.stage_finished(StageRecord("evaluate", "stopped", 2.0))
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["evaluate  started", shown]
    assert lines[-1] == "evaluate  STOPPED  2.0 s"
    if wait.text:
        assert len(lines) == 3, "the second line about a wait comes later than the first"


def test_a_closed_stream_ends_the_lines_but_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "_SECONDS_OF_SILENCE", (0.0,))
    monkeypatch.setattr(displays, "_TICK_SECONDS", 0.001)
    stream = io.StringIO()
    before = set(threading.enumerate())
    display = PlainDisplay(stream)
    stream.close()
    display.waiting(Waiting("starting Ray"))
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (3914, "1:05:14")]
)
def test_clock_formats_durations(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_a_table_is_not_truncated_in_a_file() -> None:
    stream = io.StringIO()
    console_on(stream).print("x" * 300)
    assert stream.getvalue() == "x" * 300 + "\n"
