"""The tools that ship with the project."""

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.environments.sandbox import Limits
from nemo_rl_core.environments.tools.calculator import calculate
from nemo_rl_core.environments.tools.python import PythonRunner
from nemo_rl_core.environments.tools.retriever import Retriever
from nemo_rl_core.errors import DataError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", "3"),
        ("3 * (4 + 5)", "27"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1 / 4", "0.25"),
        ("2^10", "1024"),
        ("2**0.5", repr(math.sqrt(2))),
        ("--3", "3"),
        ("1e3", "1000.0"),
        (" 5 \u2212 3 \u00d7 2 ", "-1"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "__import__('os')",
        "(1).__class__",
        "[1][0]",
        "'a' * 3",
        "True",
        "1j",
        "1 if 1 else 2",
        "1 < 2",
        "lambda: 1",
        "1 / 0",
        "0 ** -1",
        "(-8) ** 0.5",
        "9 ** 9 ** 9",
        "2 ** 5000",
        "10.0 ** 400",
        "(" * 250 + ")" * 250,
        "1 +",
        "1; 2",
        "1" * 501,
        "1 << 100",
        "\x00",
    ],
)
def test_the_calculator_refuses_other_expressions(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_the_calculator_agrees_with_integers(a: int, b: int, sign: str) -> None:
    expected = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"({a}) {sign} ({b})") == str(expected)


@given(st.text(alphabet="0123456789+-*/^%(). e", max_size=60))
def test_the_calculator_gives_a_number_or_a_value_error(text: str) -> None:
    started = time.monotonic()
    try:
        float(calculate(text))
    except (ValueError, OverflowError):
        assert time.monotonic() - started < 100


def test_bm25_matches_its_formula() -> None:
    retriever = Retriever(["the cat sat", "the dog", "a cat and a cat in a hat"])
    # n = 3, lengths 3, 2, 8, average 13 / 3; "cat" is in two of them.
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    first = idf * 1 * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 3 / (13 / 3)))
    third = idf * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 8 / (13 / 3)))
    assert retriever.scores("cat") == pytest.approx([first, 0.0, third])
    assert retriever.scores("CAT, cat!") == pytest.approx([2 * first, 0.0, 2 * third])


def test_the_best_passages_come_first_and_ties_keep_their_order(tmp_path: Path) -> None:
    lines = ["Paris is in France", "Rome is in Italy", "Lyon is in France", "France"]
    (tmp_path / "facts.txt").write_text("\n".join(lines) + "\n\n")
    rows = [json.dumps({"text": line}) for line in lines]
    (tmp_path / "facts.jsonl").write_text("\n".join(rows))
    for name in ("facts.txt", "facts.jsonl"):
        retriever = Retriever.from_file(tmp_path / name, num_passages=3)
        assert retriever("france?") == "France\nParis is in France\nLyon is in France"
        with pytest.raises(ValueError, match="no passage"):
            retriever("Berlin")


@pytest.mark.parametrize("content", [None, "", "\n\n", '{"title": 1}', "{", "3"])
def test_a_file_without_passages_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "facts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="no passages"):
        Retriever.from_file(path, num_passages=3)


def test_python_returns_the_output_or_the_reason_of_a_failure(namespaces: None) -> None:
    python = PythonRunner(Limits(cpu_seconds=1, memory_mib=128))
    assert python("print(6 * 7)\nprint('x')") == "42\nx"
    assert python("") == ""
    for program, message in (
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("while True: pass", "the program exceeded its limits"),
        ("while True: print('y' * 999)", "y\ntoo much output"),
        ("raise SystemExit(3)", "exit code 3"),
    ):
        with pytest.raises(ValueError, match=r"\w") as caught:
            python(program)
        assert str(caught.value).endswith(message)
