"""Source files stay short enough to read."""

from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]


def test_median_source_file_has_at_most_150_lines() -> None:
    folders = ("nemo_rl_core", "tasks", "workflows")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 100
    assert median(len(file.read_text().splitlines()) for file in files) <= 150
