import math
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.types import StepReport


def _report(step: int) -> StepReport:
    return StepReport("train_sft", step, 9, {"loss": step / 3}, {"step_seconds": 0.1})


def _steps(metrics: MetricsFile) -> list[int]:
    return [report.step for report in metrics.read()]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "in" / "metrics.jsonl")
    assert metrics.read() == []
    metrics.truncate_after(3)
    for step in (1, 2):
        metrics.append(_report(step))
    assert metrics.read() == [_report(1), _report(2)]
    metrics.append(StepReport("s", 3, 9, {"loss": float("nan")}))
    assert math.isnan(metrics.read()[-1].metrics["loss"])


def test_truncate_after_keeps_the_bytes_of_the_rest(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m")
    for step in range(1, 4):
        metrics.append(_report(step))
    before = metrics.path.read_bytes()
    for step in range(4, 7):
        metrics.append(_report(step))
    metrics.truncate_after(3)
    assert metrics.path.read_bytes() == before
    metrics.truncate_after(0)
    assert metrics.read() == []


@pytest.mark.parametrize("torn", [b"{", b'{"stage": "a"}', b"\x00\xff", b'{"st\xc3', b"x" * 9999])
def test_an_incomplete_last_line_is_ignored_and_overwritten(tmp_path: Path, torn: bytes) -> None:
    metrics = MetricsFile(tmp_path / "m")
    metrics.append(_report(1))
    with metrics.path.open("ab") as file:
        file.write(torn)
    assert _steps(metrics) == [1]
    metrics.append(_report(2))
    assert metrics.read() == [_report(1), _report(2)]


def test_a_file_with_only_an_incomplete_line_is_empty(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m")
    metrics.path.write_bytes(b'{"stage"')
    metrics.truncate_after(5)
    assert metrics.path.read_bytes() == b""
    metrics.path.write_bytes(b'{"stage"')
    metrics.append(_report(1))
    assert _steps(metrics) == [1]


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[]\n", b'{"step": 1}\n', b"\n"])
def test_a_damaged_line_within_is_named(tmp_path: Path, line: bytes) -> None:
    metrics = MetricsFile(tmp_path / "m")
    metrics.append(_report(1))
    metrics.path.write_bytes(metrics.path.read_bytes() + line)
    with pytest.raises(StoreError, match="line 2 of"):
        metrics.read()


def test_a_full_disk_keeps_the_earlier_lines(small_disk: Path) -> None:
    metrics = MetricsFile(small_disk / "m")
    metrics.append(_report(1))
    with pytest.raises(StoreError, match="no space left"):
        metrics.append(StepReport("x" * 2**21, 2, 2, {}))
    assert metrics.read() == [_report(1)]
    metrics.append(_report(2))
    assert _steps(metrics) == [1, 2]


@pytest.mark.slow
def test_kills_at_random_times_lose_or_repeat_no_step(
    tmp_path: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    script = """
import itertools, sys
from pathlib import Path
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.types import StepReport
metrics = MetricsFile(Path(sys.argv[1]))
last = len(metrics.read())
print(last, flush=True)
metrics.truncate_after(last - 1)
for step in itertools.count(max(last, 1)):
    metrics.append(StepReport("s" * 1000, step, 9, {"loss": 1.0}))
"""
    rng, metrics = random.Random(2), MetricsFile(tmp_path / "m")
    for _ in range(12):
        child = spawn(script, metrics.path)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.1))
        child.kill()
        child.communicate()
        steps = _steps(metrics)
        assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 12
