"""One name, one meaning: no two public classes share a name."""

import ast
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def public_classes() -> dict[str, list[str]]:
    classes: dict[str, list[str]] = defaultdict(list)
    for package in ("nemo_rl_core", "tasks", "workflows"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(str(file.relative_to(REPOSITORY)))
    return classes


def test_no_two_public_classes_share_a_name() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}
