"""Runs that are stopped from outside: their messages, exit codes, and a second signal."""

import os
import signal
import subprocess
import sys

import pytest

from tasks.ray_cluster.stopping import StopPosition, StopSignals, stopped_lines, typed_command


@pytest.mark.parametrize(
    ("position", "where", "saved"),
    [
        (
            StopPosition("grpo_iteration 2", 16, 30, num_steps_before=30, saved=45, num_finished=5),
            "at step 16 of 30 of grpo_iteration 2",
            "step 15 of grpo_iteration 2, and the 5 stages before it",
        ),
        (
            StopPosition("train_sft", 3, 6, num_steps_before=0, num_finished=1),
            "at step 3 of 6 of train_sft",
            "the stage before it; train_sft has no save yet and will restart",
        ),
        (
            StopPosition("train_sft", saved=45, waited_for="starting Ray"),
            "in train_sft while starting Ray",
            "step 45 of the full run, in train_sft",
        ),
        (
            StopPosition("prepare_model"),
            "in prepare_model",
            "prepare_model has no save yet and will restart",
        ),
        (StopPosition(num_finished=2), "between two stages", "the 2 stages"),
        (StopPosition(), "before its first stage", "nothing yet"),
    ],
)
def test_position_and_saves_are_described(position: StopPosition, where: str, saved: str) -> None:
    assert (position.describe(), position.describe_saves()) == (where, saved)


def test_the_lines_of_a_stopped_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/v/python", "/v/pyflyte", "run", "a b.py", "grpo"])
    assert stopped_lines(signal.SIGTERM, StopPosition("train_sft", 3, 6, 0, 2), seconds=221.2) == [
        "stopped from outside (SIGTERM) at step 3 of 6 of train_sft, after 3 min 41 s",
        "  saved: step 2 of train_sft",
        "  resume with: /v/pyflyte run 'a b.py' grpo",
    ]


def test_a_script_is_named_with_its_interpreter() -> None:
    assert typed_command(["/v/python", "-m", "mine", "x y"]) == "/v/python -m mine 'x y'"
    assert typed_command(["/v/python", "mine.py"]) == "/v/python mine.py"


def test_a_notebook_gets_its_interrupt_and_its_handler_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.received is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_run_is_not_a_stop() -> None:
    with pytest.raises(SystemExit) as ended, StopSignals() as signals:
        raise SystemExit(1)
    assert ended.value.code == 1
    assert signals.stopped_by(ended.value) is None
    assert signals.stopped_by(SystemExit(signal.SIGTERM)) is signal.SIGTERM  # of Ray's own handler


@pytest.mark.parametrize("does_stop", [True, False])
def test_work_that_can_save_first_ends_by_itself(does_stop: bool) -> None:
    reached = []
    with pytest.raises(SystemExit) as ended, StopSignals(lambda: does_stop):
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("the end of the step")
        raise KeyboardInterrupt  # as a loop of steps does after its save
    assert ended.value.code == 143
    assert bool(reached) == does_stop, "where nothing listens, the work is interrupted at once"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, before)


_SCRIPT = """
import sys, time
import click
from tasks.ray_cluster.stopping import StopSignals

@click.command()
@click.argument("seconds_to_end", type=float)
def main(seconds_to_end):
    with StopSignals() as signals:
        signals.report_to(1)
        try:
            print("running", flush=True)
            time.sleep(60)
        finally:
            time.sleep(seconds_to_end)
            print("ended in order", flush=True)

main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_the_exit_code_of_a_command(number: signal.Signals, code: int, times: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, "0" if times == 1 else "60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    assert "stopping gracefully; a second signal stops the run at once" in process.stdout.readline()
    if times == 2:
        process.send_signal(number)
    rest = process.stdout.read()  # `communicate` would lose what `readline` has read ahead
    process.wait(timeout=50)
    assert ("ended in order" in rest) == (times == 1)
    assert ("stopped at once" in rest) == (times == 2)
    assert process.returncode == code
