"""Published sets of programming problems, as rows of the environment `code`."""

import json
from typing import Any

import pytest

from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError
from tests.unit.data.code_rows import (
    APPS,
    CODE_CONTESTS,
    HUMAN_EVAL,
    KOD_CODE,
    LIVE_CODE_BENCH_CALL,
    MBPP,
    PRIME,
    ROWS,
)


def _row(record: dict[str, Any]) -> Any:
    (row,) = recognize([record], where="the data", task="code").rows
    return row


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_format_is_recognized(name: str) -> None:
    form, record, program = ROWS[name]
    recognized = recognize([record], where="the data", task="code")
    assert recognized.read_as.startswith(f"{form}: ")
    assert bool(recognized.rows[0]["completion"]) is (program is None)


def test_prompts_say_how_the_program_is_called() -> None:
    assert _row(APPS)["prompt"].endswith(
        "Read the input from stdin and write the output to stdout. Answer with a Python program "
        "in a ```python block."
    )
    assert MBPP["test_list"][0] in _row(MBPP)["prompt"]  # type: ignore[index]
    assert "class Solution:" in _row(LIVE_CODE_BENCH_CALL)["prompt"]
    assert "The program defines `Stack`, `reverse(text)`. Answer" in _row(KOD_CODE)["prompt"]
    assert _row(HUMAN_EVAL)["prompt"] == HUMAN_EVAL["prompt"]


def test_each_pytest_function_is_one_test() -> None:
    metadata = json.loads(_row(KOD_CODE)["metadata"])
    assert [test.splitlines()[0] for test in metadata["tests"]] == [
        "def test_push():",
        "def test_empty():",
        "@pytest.mark.parametrize('given, expected', [('ab', 'ba'), ('', '')])",
    ]
    assert metadata["setup"] == "import pytest"
    assert metadata["entry_point"] == ["Stack", "reverse"]


def test_private_tests_in_json_are_read_and_pickles_are_not() -> None:
    assert len(json.loads(_row(LIVE_CODE_BENCH_CALL)["metadata"])["tests"]) == 2
    record = {**LIVE_CODE_BENCH_CALL, "private_test_cases": "gASVFQAAAAAAAACMBXBvc2l4lIwGc3lzdGVt"}
    assert len(json.loads(_row(record)["metadata"])["tests"]) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**APPS, "input_output": ""}, "lacks the column|has no tests in input_output"),
        ({**MBPP, "test_list": ["assert other(1)"]}, "call nothing that its code defines"),
        ({**KOD_CODE, "test": "def test_a(): assert True"}, "from solution import"),
        ({**CODE_CONTESTS, "input_file": "a.in"}, "reads or writes a file"),
        ({**PRIME, "verification_info": '{"test_cases": []}'}, "has no tests"),
        (
            {
                **PRIME,
                "verification_info": {"test_cases": [{"type": "x", "input": "", "output": ""}]},
            },
            "test of the unknown type 'x'",
        ),
        (
            {
                "task_id": "BigCodeBench/0",
                "complete_prompt": "import pandas as pd\n",
                "instruct_prompt": "Write f.",
                "canonical_solution": "",
                "code_prompt": "",
                "test": "class TestCases(unittest.TestCase): pass",
                "entry_point": "task_func",
                "doc_struct": "{}",
                "libs": "['pandas']",
            },
            "needs packages",
        ),
        (
            {
                "task_id": 1,
                "prompt": "def f_1(d):\n",
                "suffix": "",
                "canonical_solution": "d",
                "test_start": "def check(candidate):",
                "test": ["assert candidate(1) == 1"],
                "entry_point": "f_1",
                "intent": "Sort d.",
                "library": ["pandas"],
            },
            "needs packages",
        ),
    ],
)
def test_problems_that_cannot_be_run_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        recognize([record], where="the data", task="code")


def test_sets_can_be_trained_on_by_sft() -> None:
    rows = [{**MBPP, "task_id": n, "text": f"Write {n}."} for n in range(10)]
    data = DataModule.of(rows)
    assert data.read_as.startswith("mbpp: ")
    assert data.train["completion"][0].startswith("```python\ndef similar_elements")
