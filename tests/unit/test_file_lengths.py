"""Source files stay short enough to read."""

from pathlib import Path
from statistics import median

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_median_source_file_has_at_most_150_lines() -> None:
    folders = ("nemo_rl_core", "tasks", "workflows")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 100
    assert median(len(file.read_text().splitlines()) for file in files) <= 150


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("api/*.py", 300),
        ("algorithms/*/trainer.py", 300),
        ("backends/*/base.py", 400),
        ("backends/**/*.py", 500),
        ("trainers/base.py", 500),
    ],
)
def test_modules_keep_to_the_limits_of_the_architecture_guide(pattern: str, most: int) -> None:
    files = [*(REPOSITORY / "nemo_rl_core").glob(pattern)]
    assert files
    # The guide's figures are approximate, as in "~500".
    assert [file for file in files if len(file.read_text().splitlines()) > 1.1 * most] == []
