"""No source file is longer than a reader can keep in mind."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 500


@pytest.mark.parametrize("folder", ["nemo_rl_core", "tasks", "workflows", "tests", "docs/generate"])
def test_no_file_is_too_long(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    lengths = {str(file.relative_to(REPOSITORY)): _num_lines(file) for file in files}
    assert lengths
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def _num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())
