"""The command in hints is one that the reader can paste."""

import sys
from pathlib import Path

import pytest

from nemo_rl_core.telemetry.program import program


def test_it_is_the_one_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert program() == "nemo-rl"  # an image has the packages, and not the project
    (tmp_path / "nemo-rl").touch()
    assert program() == str(tmp_path / "nemo-rl")
