"""A changed reward function has another digest, wherever it was written."""

import collections
import datetime
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.store.object_source import object_source

REPOSITORY = Path(__file__).resolve().parents[3]


def made(text: str, **variables: Any) -> Any:
    """Returns `f` of a cell of a notebook, whose source is in no module."""
    names = {"__name__": "__main__", **variables}
    exec(compile(text, "<cell>", "exec"), names)
    return names["f"]


def digest(text: str, **variables: Any) -> str:
    source = object_source(made(text, **variables))
    assert source.unknown == ()
    return source.digest


def test_the_code_of_a_sets_elements_is_included() -> None:
    source = object_source({digest, threading.Lock()})
    assert source.code == object_source([digest, threading.Lock()]).code != frozenset()
    assert source.unknown == ("_thread.lock",)


PLAIN = "def f(prompt, completion):\n    return float(len(completion))"


@pytest.mark.parametrize(
    "same",
    [
        "def f(prompt, completion):\n    # shorter\n\n    return float(len(completion))",
        'def f(prompt, completion):\n    """The length."""\n    return float(len(completion))',
        "unused = 3\n\n" + PLAIN,
    ],
)
def test_comments_docstrings_and_other_lines_do_not_count(same: str) -> None:
    assert digest(same) == digest(PLAIN)


HELPED = "def rate(text):\n    return {}\ndef f(completion):\n    return rate(completion) * SCALE"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.replace("len(completion)", "-len(completion)")),
        (PLAIN, PLAIN.replace("float(len(completion))", "1.0")),
        (HELPED.format("1") + "\nSCALE = 1", HELPED.format("2") + "\nSCALE = 1"),
        (HELPED.format("1") + "\nSCALE = 1", HELPED.format("1") + "\nSCALE = 2"),
        ("f = lambda completion, best=7: best", "f = lambda completion, best=8: best"),
        (
            "def g(n):\n    return lambda completion: n\nf = g(1)",
            "def g(n):\n    return lambda completion: n\nf = g(2)",
        ),
        (
            "class R:\n    def __call__(self, completion):\n        return 1\nf = R()",
            "class R:\n    def __call__(self, completion):\n        return 2\nf = R()",
        ),
        (
            "class R:\n    def __init__(self, n):\n        self.n = n\nf = R([1])",
            "class R:\n    def __init__(self, n):\n        self.n = n\nf = R([2])",
        ),
        ("import re\nf = re.compile('a')", "import re\nf = re.compile('b')"),
        (
            "WORDS = {'a'}\ndef f(c): return c in WORDS",
            "WORDS = {'b'}\ndef f(c): return c in WORDS",
        ),
        ("def f(c): return c in {'a', 'b'}", "def f(c): return c in {'a', 'c'}"),
    ],
)
def test_code_values_and_helpers_count(one: str, other: str) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_arguments_of_partial_count() -> None:
    def near(distance: int, completion: str) -> float:
        return float(distance)

    parts = [functools.partial(near, number) for number in (1, 1, 2)]
    first, same, other = (object_source(each).digest for each in parts)
    assert first == same != other


def test_a_method_counts_with_its_object() -> None:
    class Judge:
        def __init__(self, best: int) -> None:
            self.best = best

        def score(self, completion: str) -> float:
            return float(self.best)

    methods: list[Callable[..., float]] = [Judge(1).score, Judge(1).score, Judge(2).score]
    first, same, other = (object_source(each).digest for each in methods)
    assert first == same != other


def test_functions_in_functions_of_a_module_count_by_their_code() -> None:
    ones = [lambda completion: 1.0, lambda completion: 2.0, lambda completion: 1.0]
    first, other, same = (object_source(each).digest for each in ones)
    assert first == same != other


def test_values_that_cannot_be_compared_are_named() -> None:
    source = (
        "import threading\nLOCK = threading.Lock()\ndef f(c):\n    with LOCK:\n        return 1"
    )
    result = object_source(made(source))
    assert result.unknown == ("_thread.lock",)
    assert result.digest != object_source(made(source)).digest


def test_a_function_of_a_module_counts_with_what_the_module_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is a separate process, as if a user ran the script again."""
    script = (
        "import my_rewards\nfrom nemo_rl_core.store.object_source import object_source\n"
        "print(object_source(my_rewards.near).digest)"
    )
    (tmp_path / "my_rewards.py").write_text(
        "from helper import rate\ndef near(completion): return rate(completion)"
    )

    def run(helper: str) -> str:
        (tmp_path / "helper.py").write_text(helper)
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "PYTHONHASHSEED": "random"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    first = run("def rate(text): return 1")
    assert run("def rate(text): return 1  # the same") == first
    assert run("def rate(text): return 22") != first


class Day(datetime.date):
    """A class whose instances have content besides attributes."""


class Window(collections.deque[int]):
    """Another one."""


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (Day(2020, 1, 1), Day(2020, 1, 1), Day(2021, 1, 1)),
        (Window([1]), Window([1]), Window([2])),
    ],
)
def test_values_of_built_in_base_classes_count(one: Any, same: Any, other: Any) -> None:
    assert object_source(one) == object_source(same) != object_source(other)
    assert object_source(one).unknown == ()
