import fcntl
import io
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.display import PlainDisplay, RichDisplay, choose_display, show_on
from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import (
    Event,
    Note,
    StageRecord,
    StageStarted,
    publish,
    report,
    subscribe,
)
from nemo_rl_core.telemetry.run_log import RunLog
from nemo_rl_core.types import StepReport

STEP = StepReport("sft", 1, 2, {"loss": 0.5})


@pytest.fixture
def run_log(tmp_path: Path) -> Iterator[RunLog]:
    with RunLog.start(Store(tmp_path)) as log:
        yield log


def test_events_reach_every_subscriber_until_it_unsubscribes() -> None:
    report(STEP)  # no subscriber: nothing happens
    one: list[Event] = []
    two: list[Event] = []
    end_one, end_two = subscribe(one.append), subscribe(two.append)
    report(STEP)
    end_one()
    end_one()
    publish(Note("x"))
    end_two()
    publish(Note("y"))
    assert one == [STEP]
    assert two == [STEP, Note("x")]


def test_a_failing_subscriber_is_dropped_and_the_others_continue() -> None:
    calls, heard = [], []

    def broken(event: Event) -> None:
        calls.append(event)
        raise BrokenPipeError

    ends = [subscribe(broken), subscribe(heard.append)]
    report(STEP)
    report(STEP)
    for end in ends:
        end()
    assert (len(calls), len(heard)) == (1, 2)


def test_the_run_log_has_a_separate_folder_and_restores_loggers(tmp_path: Path) -> None:
    library = logging.getLogger("ray")
    before = (library.handlers, library.propagate, library.level)
    store = Store(tmp_path)
    first, second = RunLog.start(store), RunLog.start(store)
    assert first.folder != second.folder
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", first.folder.name)
    assert first.path == store.runs / first.folder.name / "run.log"
    second.close()
    first.close()
    first.close()
    assert (library.handlers, library.propagate, library.level) == before


def test_libraries_log_only_to_the_file(run_log: RunLog, capfd: pytest.CaptureFixture[str]) -> None:
    # Like libraries that are imported during the run.
    for name in ("vllm", "transformers"):
        logging.getLogger(name).addHandler(logging.StreamHandler())
    publish(StageStarted("sft"))
    for name in ("ray.worker", "vllm.engine", "flytekit", "transformers.x", "datasets"):
        logging.getLogger(name).warning("from %s", name)
    logging.getLogger("flytekit").info("a complete config")
    warnings.warn("a warning \udc80", stacklevel=1)
    assert capfd.readouterr() == ("", "")
    text = run_log.path.read_text()
    for name in ("ray.worker", "vllm.engine", "flytekit", "transformers.x", "datasets"):
        assert f" {name}: from {name}\n" in text
        assert text.count(f"from {name}\n") == 1
    assert "a warning \\udc80" in text
    assert "a complete config" not in text


def test_our_warnings_are_shown_too(run_log: RunLog, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[Event] = []
    end = subscribe(heard.append)
    ours = logging.getLogger("nemo_rl_core.store.store")
    ours.info("quiet")
    ours.warning("waiting for %d", 7)
    end()
    assert heard == [Note("waiting for 7")]
    assert capfd.readouterr() == ("", "")
    assert "INFO" in run_log.path.read_text()
    assert "waiting for 7" in run_log.path.read_text()


def test_threads_that_log_and_publish_do_not_block_each_other(run_log: RunLog) -> None:
    ours = logging.getLogger("nemo_rl_core.test")
    end = subscribe(lambda event: ours.warning("shown") if isinstance(event, StepReport) else None)

    def work() -> None:
        for _ in range(200):
            report(STEP)
            ours.warning("x")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=500)
    end()
    assert not any(thread.is_alive() for thread in threads)


def test_trace_writes_the_cause_only_to_the_file(
    run_log: RunLog, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        try:
            raise OSError("deep")
        except OSError as cause:
            raise StoreError("shallow", fix="that") from cause
    except StoreError as error:
        run_log.trace(error)
    text = run_log.path.read_text()
    assert "OSError: deep" in text
    assert "shallow" in text
    assert "Traceback" in text
    assert capfd.readouterr() == ("", "")


def test_a_store_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="a file is in the way"):
        RunLog.start(Store(tmp_path))


def test_plain_lines_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 0.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    display = choose_display(stream)
    assert isinstance(display, PlainDisplay)
    end = show_on(display)
    publish(StageRecord("prepare_data", "cached", 0.1))
    publish(StageStarted("grpo"))
    # Resumed at 41. One step took 2 s and 1,957 are left: 3,914 s = 1 h 5 min 14 s.
    report(StepReport("grpo", 42, 2000, {"reward": 0.25, "loss": 1.0}))
    report(StepReport("grpo", 43, 2000, {"loss": -1.0}, {"tokens_per_second": 12345.6}))
    publish(Note("look: [bold]"))
    publish(StageRecord("grpo", "failed", 12.34, note="out of memory"))
    end()
    display.close()
    assert stream.getvalue().splitlines() == [
        "prepare_data  CACHED",
        "grpo  started",
        "grpo 42/2000  reward 0.250",
        "grpo 43/2000  loss -1.000  12,346 tokens/s  1:05:14 left",
        "look: [bold]",
        "grpo  FAILED  12.3 s  out of memory",
    ]


def test_summary_table_shows_every_stage_and_the_sums() -> None:
    from rich.console import Console

    stream = io.StringIO()
    records = [
        StageRecord("prepare [bold]", "cached", 0.25),
        StageRecord("sft", "ran", 10.5, tokens=1200, peak_memory_gib=1.25, note="0.40"),
        StageRecord("grpo", "ran", 20.0, tokens=300, peak_memory_gib=0.75),
    ]
    Console(file=stream, width=100).print(summary_table(records))
    rows = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in stream.getvalue().splitlines()]
    assert ["prepare [bold]", "CACHED", "0.2", "", ""] in rows
    assert ["sft", "ran", "10.5", "1,200", "1.25"] in rows
    assert ["total", "", "30.8", "1,500", "1.25"] in rows


SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
from nemo_rl_core.telemetry.display import choose_display, show_on
from nemo_rl_core.telemetry.events import *
from nemo_rl_core.telemetry.run_log import *
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import StepReport
with RunLog.start(Store(Path(sys.argv[1]))) as log:
    with redirect_descriptors(log.path) as terminal:
        display = choose_display(terminal)
        end = show_on(display)
        publish(StageRecord("prepare_data", "cached", 0.1))
        publish(StageStarted("grpo [1]"))
        os.write(1, b"NOISE one\\n")
        os.write(2, b"NOISE two\\n")
        subprocess.run(["sh", "-c", "echo NOISE child; echo NOISE error >&2"])
        print("NOISE print")
        for step in (1, 2, 3):
            report(StepReport("grpo [1]", step, 3, {"reward": step / 4}, {"tokens_per_second": 99}))
            time.sleep(0.3)
        publish(Note("a note"))
        publish(StageRecord("grpo [1]", "ran", 0.9))
        end()
        display.close()
        terminal.write(type(display).__name__ + "\\n")
        if sys.argv[2] == "fail":
            raise SystemExit("as it failed")
print("back on the terminal")
os.write(2, b"and errors\\n")
"""
NOISE = ["NOISE one", "NOISE two", "NOISE child", "NOISE error", "NOISE print"]


def _command(store: Path, end: str = "well") -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(store), end]


def _log_text(store: Path) -> str:
    (path,) = store.glob("runs/*/run.log")
    return path.read_text()


def _run_in_terminal(command: list[str], columns: int, term: str = "xterm-256color") -> str:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        command, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL,
        env=dict(os.environ, TERM=term),
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(controller, 65536):
            shown += block
    except OSError:
        pass  # Linux raises EIO once the last writer is gone
    os.close(controller)
    assert child.wait(timeout=500) == 0, shown.decode()
    return shown.decode()


def test_a_pipe_gets_plain_lines_and_no_noise(tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path), capture_output=True, text=True, check=True)
    assert [re.sub(r"  0:\d\d left", "", line) for line in done.stdout.splitlines()] == [
        "prepare_data  CACHED",
        "grpo [1]  started",
        "grpo [1] 1/3  reward 0.250  99 tokens/s",
        "grpo [1] 2/3  reward 0.500  99 tokens/s",
        "grpo [1] 3/3  reward 0.750  99 tokens/s",
        "a note",
        "grpo [1]  ran  0.9 s",
        "PlainDisplay",
        "back on the terminal",
    ]
    assert done.stderr == "and errors\n"
    log = _log_text(tmp_path)
    assert all(noise in log for noise in NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [100, 44])
def test_a_terminal_gets_one_live_line(tmp_path: Path, columns: int) -> None:
    shown = _run_in_terminal(_command(tmp_path), columns)
    assert "NOISE" not in shown
    assert "RichDisplay" in shown
    assert "back on the terminal" in shown
    assert "and errors" in shown
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor must come back"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "prepare_data  CACHED" in text
    assert "grpo [1]  ran  0.9 s" in text
    assert "2/3  reward 0.500" in text
    drawn = [line for part in text.split("\n") for line in part.split("\r")]
    assert max(map(len, drawn)) <= columns
    # Redrawn text is between carriage returns; only permanent text ends a line.
    kept = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    assert sum("reward" in line for line in kept) <= 4
    assert all(noise in _log_text(tmp_path) for noise in NOISE)


def _all_that_was_shown(controller: int) -> str:
    """Reads everything in a terminal's buffer, since one read returns only a part."""
    parts = []
    poll = select.poll()  # unlike select, with descriptors above 1,023 too
    poll.register(controller, select.POLLIN)
    while poll.poll(200):
        parts.append(os.read(controller, 65536))
    return b"".join(parts).decode()


def test_a_live_display_follows_stages_and_window_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        display = choose_display(stream)
        assert isinstance(display, RichDisplay)
        display.step(StepReport("unannounced", 1, 2, {"loss": 0.5}))
        time.sleep(0.3)  # four frames per second
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
        display.stage_started("a_stage_with_a_long_name")
        display.step(StepReport("a_stage_with_a_long_name", 1, 2, {"reward": 0.5}))
        display.note("x" * 40)
        display.stage_finished(StageRecord("a_stage_with_a_long_name", "failed", 1.0))
        display.close()
        display.close()
        shown = _all_that_was_shown(controller)
    os.close(controller)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "1/2  loss 0.500" in text
    assert f"{'x' * 30}\r\n{'x' * 10}" in text, "a long note wraps at the new width"
    assert "FAILED" in text


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path: Path) -> None:
    shown = _run_in_terminal(_command(tmp_path), 80, term="dumb")
    assert "PlainDisplay" in shown
    assert "\x1b" not in shown


def test_descriptors_are_restored_after_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path, "fail"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "as it failed\n"


def test_closing_the_terminal_does_not_end_the_run(tmp_path: Path) -> None:
    command = f"{sys.executable} -c '{_DETACHED}' {tmp_path} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "sft 1/50\n"
    assert (tmp_path / "end").read_text() == "reached"


_DETACHED = """
import sys, time
from pathlib import Path
from nemo_rl_core.telemetry.display import choose_display, show_on
from nemo_rl_core.telemetry.events import *
from nemo_rl_core.telemetry.run_log import *
from nemo_rl_core.types import StepReport
with redirect_descriptors(Path(sys.argv[1]) / "log") as terminal:
    show_on(choose_display(terminal))
    for step in range(1, 51):
        report(StepReport("sft", step, 50, {}))
        time.sleep(0.02)
(Path(sys.argv[1]) / "end").write_text("reached")
"""


@pytest.mark.slow
def test_real_libraries_are_quiet_on_the_terminal(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from nemo_rl_core.telemetry.events import StageStarted, publish
from nemo_rl_core.telemetry.run_log import RunLog
from nemo_rl_core.store.store import Store
import flytekit
with RunLog.start(Store(Path(sys.argv[1]))):
    import ray, transformers, datasets
    publish(StageStarted("x"))
    import logging
    for name in ("ray", "flytekit", "transformers", "datasets"):
        logging.getLogger(name + ".deep").error("from " + name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    log = _log_text(tmp_path)
    for name in ("ray", "flytekit", "transformers", "datasets"):
        assert f"from {name}" in log
        assert f"from {name}" not in done.stdout + done.stderr
