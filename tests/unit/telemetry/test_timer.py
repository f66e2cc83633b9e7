import os
import subprocess
import sys
import time

import pytest

from nemo_rl_core.telemetry.usage import Timer, peak_memory_gib


def test_phases_add_up_and_reset() -> None:
    timer = Timer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError), timer.phase("train"):
        raise RuntimeError
    taken = timer.take()
    assert list(taken) == ["rollout_seconds", "train_seconds"]
    # Two sleeps of 0.02 s; the upper bound allows pauses on a busy machine.
    assert 0.04 <= taken["rollout_seconds"] < 2
    assert 0 <= taken["train_seconds"] < taken["rollout_seconds"]
    assert timer.take() == {}


def test_peak_memory_includes_freed_memory() -> None:
    script = (
        "from nemo_rl_core.telemetry.usage import peak_memory_gib as peak\n"
        "before = peak()\n"
        "block = bytearray(256 * 2**20)\n"
        "block[::4096] = b'x' * (len(block) // 4096)\n"
        "del block\n"
        "print(peak() - before)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # 256 MiB are 0.25 GiB; the interpreter needs a few hundredths.
    assert 0.24 < float(out.stdout) < 0.32


def test_peak_memory_of_several_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent, child_only = peak_memory_gib(), peak_memory_gib([child.pid])
    assert child_only > 0
    both = peak_memory_gib([os.getpid(), child.pid])
    child.communicate(b"\n")
    assert both >= parent + child_only
    assert peak_memory_gib([child.pid]) == 0
