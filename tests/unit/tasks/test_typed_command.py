"""The recorded command of a run."""

import sys

import pytest

from tasks.local_run.run import recorded_command


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        (["python", "-u", "/env/bin/nemo-rl", "run", "grpo", "a=b"], "nemo-rl run grpo a=b"),
        (["python", "/env/bin/pyflyte", "run", "grpo.py"], "pyflyte run x"),
    ],
)
def test_a_run_records_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], recorded: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", ["pyflyte", "run", "x"])
    assert " ".join(recorded_command()) == recorded
