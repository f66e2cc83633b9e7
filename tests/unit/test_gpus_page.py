"""tests/gpu/README.md: every default and problem names existing tests."""

import ast
import re
from collections.abc import Iterator

from tests.documents import REPOSITORY

PAGE = (REPOSITORY / "tests/gpu/README.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NUM_POINTS, NUM_DEFAULTS = 15, 14


def rows(heading: str) -> Iterator[list[str]]:
    """Yields the cells of the tables with three columns below a heading, without table heads."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_head = cells[0] in ("point", "setting") or set(cells[0]) <= {"-"}
        if len(cells) == 3 and not is_head:
            yield cells


def test_every_named_test_exists() -> None:
    named = TEST.findall(PAGE)
    missing = []
    for path, name in named:
        file = REPOSITORY / path
        statements = ast.parse(file.read_text()).body if file.exists() else []
        if name not in {each.name for each in statements if isinstance(each, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert len(named) > 40
    assert missing == []


def test_every_point_and_every_default_has_a_test() -> None:
    points, defaults = list(rows("What would stop a run")), list(rows("Defaults on GPUs"))
    numbers = {int(point.split()[0]) for point, _, _ in points}
    assert numbers == set(range(1, NUM_POINTS + 1))
    assert len(defaults) >= NUM_DEFAULTS
    assert [first for first, _, tests in points + defaults if not TEST.findall(tests)] == []
