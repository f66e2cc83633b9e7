"""Reading of a run's log."""

import time
from pathlib import Path

import pytest

from nemo_rl_core.ui import logs
from nemo_rl_core.ui.logs import newest

LINES = [
    "2026-01-01 00:00:00,000 INFO 7 flytekit: Invoking with {'config': 1}",
    "\x1b[36m(worker pid=7)\x1b[0m INFO 01-01 00:00:01 [engine.py:12] loaded",
    "10%|#   |\r50%|##  |\r100%|####|\r",
    "2026-01-01 00:00:02,000 WARNING 7 flytekit.core: slow",
    "2026-01-01 00:00:03,000 ERROR 7 nemo_rl_core: the run failed",
    "Traceback (most recent call last):",
    "  ValueError: Bad",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_bytes("\n".join(LINES).encode())
    return path


def test_colors_bars_and_dumps_of_flytekit_are_removed(path: Path) -> None:
    part = newest(path)
    assert part is not None
    assert part.text.split("\n") == [
        "(worker pid=7) INFO 01-01 00:00:01 [engine.py:12] loaded",
        "100%|####|",
        *LINES[3:],
    ]
    assert (part.num_noisy, part.is_cut) == (1, False)
    assert newest(path, noisy=True).text.startswith("2026-01-01 00:00:00,000 INFO 7 flytekit")


def test_the_newest_record_comes_first_with_its_traceback(path: Path) -> None:
    assert newest(path).newest_first.split("\n")[:4] == [*LINES[4:], LINES[3]]


@pytest.mark.parametrize(
    ("level", "text", "first_words"),
    [
        ("WARNING", "", ["2026-01-01 00:00:02,000", "2026-01-01 00:00:03,000"]),
        ("ERROR", "", ["2026-01-01 00:00:03,000"]),
        ("", "bad", ["2026-01-01 00:00:03,000"]),
        ("INFO", "LOADED", ["(worker pid=7) INFO 01-01"]),
        ("ERROR", "loaded", []),
    ],
)
def test_records_are_filtered_by_level_and_text(
    path: Path, level: str, text: str, first_words: list[str]
) -> None:
    records = newest(path, level=level, text=text).records
    assert [
        record.text[: len(words)] for record, words in zip(records, first_words, strict=True)
    ] == (first_words)


def test_a_part_of_a_log_starts_with_a_full_line(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"first\nsecond\nthird\xff\n")

    assert newest(path).text == "first\nsecond\nthird\\xff\n"
    assert newest(path, begin=6, end=13).text == "second\n"
    assert newest(path, begin=500).text == ""
    assert newest(tmp_path / "none") is None
    monkeypatch.setattr(logs, "READ_BYTES", 10)
    part = newest(path)
    assert (part.text, part.is_cut) == ("third\\xff\n", True)


def test_a_long_log_without_heads_is_one_record_in_linear_time(tmp_path: Path) -> None:
    """A record that is appended to line by line is copied each time."""
    path = tmp_path / "run.log"
    lines = [f"printed line {n} of a tool" for n in range(100_000)]
    path.write_text("\n".join(lines))
    began = time.process_time()
    part = newest(path, text="LINE 99999 ")
    assert time.process_time() - began < 2
    assert part.is_cut  # the record is longer than a page shows
    assert part.text == "\n".join(lines)[-logs.MAX_SHOWN :]


def test_a_long_log_shows_the_newest_records_that_fit(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs, "MAX_SHOWN", 100)
    part = newest(path)
    assert part.is_cut
    assert part.text.startswith(LINES[4][:20]) or part.text.endswith(LINES[-1])
    assert len(part.text) <= 100
