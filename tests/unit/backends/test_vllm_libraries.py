"""The library that vLLM finds in the process if the system has none."""

import _ctypes
import shutil
import sys
from pathlib import Path

import pytest

from nemo_rl_core.backends.generation.vllm_libraries import load_libnuma


def test_copy_in_the_environment_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    load_libnuma()
    library = tmp_path / "lib" / "libnuma.so.1"
    library.parent.mkdir()
    shutil.copy(_ctypes.__file__, library)
    assert str(library) not in Path("/proc/self/maps").read_text()
    load_libnuma()
    assert str(library) in Path("/proc/self/maps").read_text()
