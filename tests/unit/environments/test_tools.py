import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.multi_turn import CalculatorTool, PythonTool, RetrieverTool, ToolUse
from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.environments.rewards.exact import ExactScorer
from nemo_rl_core.environments.sandbox import Limits
from nemo_rl_core.environments.tools import ToolEnvironment, make_tools
from nemo_rl_core.environments.tools.calculator import calculate
from nemo_rl_core.environments.tools.environment import ToolCall, find_call
from nemo_rl_core.environments.tools.python import PythonRunner
from nemo_rl_core.environments.tools.retriever import Retriever
from nemo_rl_core.errors import ConfigError, DataError


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
        (retriever,) = make_tools([RetrieverTool(path=str(tmp_path / name))]).values()
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


@pytest.mark.parametrize(
    ("turn", "call"),
    [
        ("408", None),
        ("", None),
        ("</tool>", None),
        ("<tool>calculator 1 + 2</tool>", ToolCall("calculator", "1 + 2")),
        ("Well: <tool> calculator: 1 + 2 </tool> 3", ToolCall("calculator", "1 + 2")),
        ("<tool>python\nx = 1\nprint(x)\n</tool>", ToolCall("python", "x = 1\nprint(x)")),
        ("<tool>calculator 1 + 2", ToolCall("calculator", "1 + 2")),
        ("<tool>a 1</tool><tool>b 2</tool>", ToolCall("a", "1")),
        ("<tool></tool>", ToolCall("", "")),
        ("<tool>clock</tool>", ToolCall("clock", "")),
    ],
)
def test_calls_are_found(turn: str, call: ToolCall | None) -> None:
    assert find_call(turn) == call


ROW = {"answer": "408", "task": "products"}
Environment = ToolEnvironment


@pytest.fixture
def environment() -> Environment:
    config = ToolUse(max_calls=2, max_result_characters=20)

    def broken(argument: str) -> str:
        raise OSError("the index is gone")

    def echo(argument: str) -> str:
        return argument

    tools = {**make_tools(config.tools), "broken": broken, "echo": echo}
    return ToolEnvironment(config, tools, ExactScorer())


def _log(*turns: str) -> list[dict[str, str]]:
    roles = ["user", *["assistant", "environment"] * len(turns)]
    return [{"role": r, "content": t} for r, t in zip(roles, ["12 * 34?", *turns], strict=False)]


def _step(
    environment: Environment, *turns: str, metadata: dict[str, Any] | None = None
) -> EnvironmentReturn:
    return environment.step([_log(*turns)], [metadata or ROW])


def test_a_call_is_answered_and_the_answer_scored(environment: Environment) -> None:
    call = "<tool>calculator 12 * 34</tool>"
    first = _step(environment, call)
    assert first.observations == [{"role": "environment", "content": "\n<result>408</result>\n"}]
    assert first.terminateds.tolist() == [False]
    assert first.rewards.tolist() == [0.0]
    assert first.next_stop_strings == [["</tool>"]]
    assert first.errors == [None]
    result = first.observations[0]["content"]
    last = _step(environment, call, result, " 408 ", metadata=first.metadata[0])
    assert last.terminateds.tolist() == [True]
    assert last.rewards.tolist() == [1.0]
    assert _step(environment, call, result, "409").rewards.tolist() == [0.0]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("<tool>calculator 1 / 0</tool>", "error: division by zero"[:20] + " ..."),
        ("<tool>clock</tool>", "error: there is no tool 'clock', only broken, calculator, echo"),
        ("<tool>echo " + "y" * 99 + "</tool>", "y" * 20 + " ..."),
        ("<tool>echo </result>a<tool>b</tool>", "ab"),
    ],
)
def test_a_failing_call_is_answered_with_an_error_message(
    environment: Environment, call: str, result: str
) -> None:
    answer = _step(environment, call)
    assert answer.observations[0]["content"] == f"\n<result>{result}</result>\n"
    assert (answer.errors, answer.terminateds.tolist()) == ([None], [False])


def test_a_call_beyond_max_calls_is_the_last_turn(environment: Environment) -> None:
    metadata: dict[str, Any] = ROW
    for ended in (False, False, True):
        answer = _step(environment, "<tool>calculator 1</tool>", metadata=metadata)
        metadata = answer.metadata[0]
        assert answer.terminateds.tolist() == [ended]
    assert answer.rewards.tolist() == [0.0]
    assert metadata["num_calls"] == 2


def test_a_broken_tool_fails_only_its_conversation(environment: Environment) -> None:
    logs = [_log("408"), _log("<tool>broken x</tool>"), _log("<tool>calculator 1</tool>")]
    answer = environment.step(logs, [ROW] * 3)
    assert answer.errors is not None
    assert (answer.errors[0], answer.errors[2]) == (None, None)
    assert "the index is gone" in str(answer.errors[1])
    assert answer.rewards.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_an_answer_that_cannot_be_scored_is_an_error() -> None:
    environment = ToolEnvironment(ToolUse(), {}, make_scorer(MathVerify()))
    try:
        rows = [{"answer": answer, "task": "t"} for answer in ("?", "408")]
        answer = environment.step([_log("so 408"), _log("so 408")], rows)
    finally:
        environment.shutdown()
    assert answer.errors is not None
    assert "no mathematics" in str(answer.errors[0])
    assert answer.errors[1] is None
    assert answer.rewards.tolist() == [0.0, 1.0]


def test_python_and_other_tools_together(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "facts.txt").write_text("Paris is in France\n")
    tools = [CalculatorTool(), PythonTool(), RetrieverTool(path=str(tmp_path / "facts.txt"))]
    config = ToolUse(tools=tools)
    environment = ToolEnvironment(config, make_tools(tools), ExactScorer())
    calls = ["python print(sum(range(5)))", "retriever france", "calculator 5 + 5"]
    answer = environment.step([_log(f"<tool>{call}</tool>") for call in calls], [ROW] * 3)
    results = ["10", "Paris is in France", "10"]
    assert [each["content"] for each in answer.observations] == [
        f"\n<result>{result}</result>\n" for result in results
    ]


def test_the_config_makes_an_environment() -> None:
    assert isinstance(make_scorer(ToolUse()), EnvironmentScorer)


def test_a_config_names_each_tool_once() -> None:
    ToolUse.model_validate({"tools": [{"kind": "calculator"}, {"kind": "python"}]})
    with pytest.raises(ValueError, match="repeats one"):
        ToolUse(tools=[CalculatorTool(), CalculatorTool()])
    with pytest.raises(ConfigError, match="unknown key"):
        ToolUse.model_validate({"tools": [{"kind": "python", "cpu": 3}]})
