"""The program of `make bench`: order of turns, measured times, and the format of rows."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.benchmarks.comparison import __main__ as program
from tests.benchmarks.comparison.command import spent_by
from tests.benchmarks.comparison.measured import (
    Measured,
    Row,
    UnequalWorkError,
    add_to,
    compared,
    ratio,
    require_equal,
    table,
)
from tests.benchmarks.comparison.turns import Baton, Side, SideError, Turn, take_turns


def spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def works(baton: Baton, *, seconds: float) -> None:
    baton.wait()
    for turn in range(baton.num_turns):
        spend(seconds)
        baton.done(turn=turn)


def runs_by_the_clock(baton: Baton, *, seconds: float) -> None:
    """Reports when each of its turns began and ended."""
    baton.wait()
    for _ in range(baton.num_turns):
        began = time.monotonic()
        time.sleep(seconds)
        baton.done(began=began, ended=time.monotonic())


def works_between_its_turns(baton: Baton) -> None:
    """Spends CPU time in a thread all the time; reports how much of it fell between two turns."""
    threading.Thread(target=spend, args=(60.0,), daemon=True).start()
    between = 0.0
    baton.wait()
    for _ in range(baton.num_turns):
        before = time.process_time()
        baton.done(between=between)
        between = time.process_time() - before


def fails(baton: Baton) -> None:
    baton.wait()
    raise ValueError("no such rows")


@pytest.mark.slow
def test_sides_take_turns_and_are_stopped_between_them(tmp_path: Path) -> None:
    sides = {
        "short": Side(works, {"seconds": 0.2}),
        "long": Side(works, {"seconds": 0.6}),
        "busy": Side(works_between_its_turns),
    }
    turns = take_turns(sides, num_turns=2, logs=tmp_path)
    assert {name: len(each) for name, each in turns.items()} == {"short": 2, "long": 2, "busy": 2}
    assert [turn.figures["turn"] for turn in turns["long"]] == [1, 2]  # the first one was warm-up
    for name, least in (("short", 0.18), ("long", 0.58)):
        assert all(least <= turn.cpu <= turn.wall + 0.1 for turn in turns[name])
    # The others' turns took at least 0.8 s, in which a busy thread would have run.
    assert all(turn.figures["between"] < 0.4 for turn in turns["busy"])


@pytest.mark.slow
def test_sides_at_once_overlap_and_come_after_the_others(tmp_path: Path) -> None:
    sides = {
        "one": Side(runs_by_the_clock, {"seconds": 0.6}),
        "single": Side(runs_by_the_clock, {"seconds": 0.1}),
        "other": Side(runs_by_the_clock, {"seconds": 0.2}),
    }
    turns = take_turns(sides, num_turns=2, logs=tmp_path, at_once=("one", "other"))
    for single, one, other in zip(turns["single"], turns["one"], turns["other"], strict=True):
        assert max(one.figures["began"], other.figures["began"]) < other.figures["ended"]
        assert single.figures["ended"] < min(one.figures["began"], other.figures["began"])
        # Each has its own time, not that of the slowest.
        assert 0.2 <= other.wall < 0.6 <= one.wall


def test_a_side_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(SideError, match="no such rows"):
        take_turns({"broken": Side(fails)}, num_turns=1, logs=tmp_path)


@pytest.mark.slow
def test_the_time_of_a_command_includes_its_children(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    spent = spent_by(["/bin/sh", "-c", f'{sys.executable} -c "{burn}" & wait'], {}, tmp_path)
    assert spent.cpu >= 0.47  # 0.5 minus a tick of 10 ms in each of three processes
    with pytest.raises(SideError, match="ended with 3"):
        spent_by(["/bin/sh", "-c", "exit 3"], {}, tmp_path)


@pytest.mark.slow
def test_the_time_of_a_command_includes_unreaped_processes(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 1.5: pass"
    parent = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # like Ray's raylet
        f"burning = subprocess.Popen([sys.executable, '-c', {burn!r}])\n"
        "while burning.poll() is None: time.sleep(0.01)\n"
    )
    assert spent_by([sys.executable, "-c", parent], {}, tmp_path).cpu >= 0.9


def turns_with(**figures: float) -> list[Turn]:
    return [Turn(1.0, 1.0, figures)]


def test_sides_that_compute_different_things_are_refused() -> None:
    require_equal(
        "loss", {"one": turns_with(loss=0.6931), "other": turns_with(loss=0.69315)}, within=1e-3
    )
    with pytest.raises(UnequalWorkError, match="may differ by"):
        require_equal(
            "loss", {"one": turns_with(loss=0.69), "other": turns_with(loss=0.7)}, within=1e-3
        )
    for one, other in (
        (turns_with(loss=0.69), turns_with()),
        (turns_with(), turns_with(loss=0.69)),
        (turns_with(), turns_with()),
    ):
        with pytest.raises(UnequalWorkError):
            require_equal("loss", {"one": one, "other": other}, within=1e-3)


def test_ratios_by_hand() -> None:
    # Medians 6 and 2, of rounds 4/1, 6/2 and 9/3.
    measured = ratio([4.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    assert (measured.value, measured.low, measured.high) == (3.0, 3.0, 4.0)
    ours = [Turn(2.0, 1.0, {"tokens": 4.0}), Turn(2.0, 1.0, {"tokens": 4.0})]
    theirs = [Turn(6.0, 5.0, {"tokens": 2.0}), Turn(6.0, 5.0, {"tokens": 2.0})]
    per_token = compared(ours, theirs, per="tokens")
    assert per_token.figures["wall"].value == 6.0  # 3 s per token over 0.5
    assert per_token.figures["CPU"].value == 10.0
    assert per_token.medians["TRL"] == "2,500,000 µCPU-s a token, 3,000,000 µs a token"


def test_the_table_has_each_row_with_its_machine(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    measured = Measured({"wall": ratio([3.0], [2.0])}, 1, {"TRL": "3 s"}, "4 steps per turn")
    row = Row("sft", "SFT step", "≥ 4 times", lambda bench: measured)
    for machine in ("slow, 2 cores", "quick, 2 cores"):  # the later one stays
        load = {"load_before": 0.25, "load_after": 2.0}
        add_to(file, row, measured, {"machine": machine, **load})
    assert json.loads(file.read_text())["sft"]["figures"]["wall"]["value"] == 1.5
    assert table(file, ["dpo", "sft"]).splitlines() == [
        "| work | goal | measured | n, load | medians |",
        "|---|---|---|---|---|",
        "| SFT step (4 steps per turn) | ≥ 4 times | wall 1.5 times (1.5 to 1.5) [1] "
        "| 1, 0.2 to 2.0 | TRL 3 s |",
        "",
        "[1] quick, 2 cores.",
    ]


def test_the_page_of_results_has_markers_for_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "results.md"
    page.write_text(program.RESULTS.read_text())
    monkeypatch.setattr(program, "RESULTS", page)
    program.write_docs("| new |\n")
    before, after = page.read_text().split("| new |\n")
    assert before.endswith(f"{program.BEGIN}\n")
    assert after.startswith(program.END)
    assert before + after != program.BEGIN + program.END


def test_rows_have_one_name_each() -> None:
    rows = program.all_rows()
    assert len(rows) == 16
    assert set(rows) >= {"dpo_step", "grpo_whole", "least", "controller", "smollm2_training"}
