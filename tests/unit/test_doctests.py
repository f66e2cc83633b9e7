"""The examples in docstrings are correct."""

import doctest
import importlib
from pathlib import Path

import pytest

import nemo_rl_core

ROOT = Path(nemo_rl_core.__file__).parent


def _modules_with_examples() -> list[str]:
    return [
        ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted(ROOT.rglob("*.py"))
        if ">>>" in path.read_text()
    ]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples(name: str) -> None:
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        # An example whose first line is skipped needs something unavailable here, such as Ray.
        if test.examples and doctest.SKIP not in test.examples[0].options:
            assert doctest.DocTestRunner().run(test).failed == 0
