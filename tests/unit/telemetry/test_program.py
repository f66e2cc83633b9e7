"""The command in hints can be pasted."""

import sys
from pathlib import Path

import pytest

from nemo_rl_core.telemetry.console import program


def test_the_program_is_next_to_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert program() == "nemo-rl"  # an image has the packages, but not the project
    (tmp_path / "nemo-rl").touch()
    assert program() == str(tmp_path / "nemo-rl")
