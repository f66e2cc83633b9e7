"""Published data sets, as files with their original columns and types."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_core.config.data import FileData
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError

GSM8K = [
    {
        "question": f"Tom has {n} bags of 600 nails and buys one more. How many nails has he?",
        "answer": f"He has {n}+1=<<{n}+1={n + 1}>>{n + 1} bags.\n#### {(n + 1) * 600:,}",
    }
    for n in range(2, 5)
]
MATH = [
    {
        "problem": f"What is half of ${n}$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": rf"Half of it, not $\boxed{{1}}$, is $\boxed{{\frac{{{n}}}{{2}}}}$.",
    }
    for n in (3, 5, 7)
]
OPEN_MATH_INSTRUCT = [
    {
        "problem": f"Add 1 to {n}.",
        "generated_solution": f"{n} + 1 = \\boxed{{{n + 1}}}",
        "expected_answer": str(n + 1),
        "problem_source": "augmented_gsm8k",
    }
    for n in range(3)
]
VERL = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Add 1 to {n}. Answer: $Answer"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b-{n}"},
    }
    for n in range(3)
]
DEEPSCALER = [
    {"problem": f"Add 1 to {n}.", "answer": str(n + 1), "solution": "" if n else "0 + 1 = 1"}
    for n in range(3)
]
AIME = [
    {"id": 60 + n, "problem": f"Find {n}.", "solution": f"It is {n}.", "answer": f"{n:03}",
     "url": "https://example.org", "year": "2024"}
    for n in range(3)
]  # fmt: skip
AIME_2024 = [
    {"ID": f"2024-I-{n}", "Problem": f"Find {n}.", "Solution": f"It is {n}.", "Answer": n}
    for n in range(3)
]
AIME_2025 = [{"question": f"Find {n}.", "answer": str(n)} for n in range(3)]
HELPSTEER3 = [
    {
        "domain": "general",
        "language": "english",
        "context": [{"role": "user", "content": f"Say {n}."}],
        "response1": "one",
        "response2": "two",
        "overall_preference": preference,
        "individual_preference": [{"score": preference, "reasoning": "r", "feedback": "f"}],
    }
    for n, preference in enumerate((-2, 3, 0, 1))
]
ULTRAFEEDBACK = [
    {
        "prompt": f"Say {n}.",
        "prompt_id": f"a{n}",
        "chosen": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"{n}!"},
        ],
        "rejected": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": "no"},
        ],
        "messages": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"{n}!"},
        ],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }
    for n in range(3)
]
TULU = [
    {
        "id": f"personas_{n}",
        "messages": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"{n}!"},
        ],
        "source": "ai2-adapt-dev/personahub",
    }
    for n in range(3)
]
SQUAD = [
    {
        "id": f"5733be{n}",
        "title": "Rome",
        "context": f"Rome has {n + 7} hills.",
        "question": "How many hills has Rome?",
        "answers": {"text": [str(n + 7), "some"], "answer_start": [9, 0]},
    }
    for n in range(3)
]
ALPACA = [
    {"instruction": f"Say {n}.", "input": "" if n else "Loudly", "output": f"{n}!",
     "text": f"### Instruction: Say {n}."}
    for n in range(3)
]  # fmt: skip
SHAREGPT = [
    {
        "id": f"x_{n}",
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": f"Say {n}."},
            {"from": "gpt", "value": f"{n}!"},
        ],
    }
    for n in range(3)
]


def _read(folder: Path, rows: list[dict[str, Any]], **row_format: Any) -> DataModule:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return DataModule.of(path, validation_fraction=0.01, **row_format)


def _row(data: DataModule, number: int = 0) -> dict[str, Any]:
    """Returns the row with that number in the file, from either split."""
    records = [*data.train.to_dict("records"), *data.validation.to_dict("records")]
    return {str(key): value for key, value in sorted(records, key=_number)[number].items()}


def _number(row: Any) -> str:
    return str(row["id"])


@pytest.mark.parametrize(
    ("rows", "read_as", "expected"),
    [
        (GSM8K, "gsm8k", {"answer": "1800", "completion": GSM8K[0]["answer"]}),
        (MATH, "math", {"answer": r"\frac{3}{2}", "completion": MATH[0]["solution"]}),
        (
            OPEN_MATH_INSTRUCT,
            "open_math_instruct",
            {"prompt": "Add 1 to 0.", "answer": "1", "completion": r"0 + 1 = \boxed{1}"},
        ),
        (VERL, "verl", {"prompt": json.dumps(VERL[0]["prompt"]), "answer": "1"}),
        (
            DEEPSCALER,
            "problem_answer",
            {"prompt": "Add 1 to 0.", "answer": "1", "completion": "0 + 1 = 1"},
        ),
        (AIME, "problem_answer", {"id": "60", "answer": "000", "completion": "It is 0."}),
        (AIME_2024, "aime_2024", {"prompt": "Find 0.", "answer": "0", "completion": "It is 0."}),
        (AIME_2025, "question_answer", {"prompt": "Find 0.", "answer": "0", "completion": "0"}),
        (
            SQUAD,
            "squad",
            {"prompt": "Rome has 7 hills.\n\nHow many hills has Rome?", "answer": "7"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_are_read_without_a_word(
    tmp_path: Path, rows: list[dict[str, Any]], read_as: str, expected: dict[str, str]
) -> None:
    data = _read(tmp_path, rows)
    assert (data.kind, data.read_as.partition(":")[0]) == ("prompts", read_as)
    assert expected.items() <= _row(data).items()


def test_columns_for_rewards_reach_them(tmp_path: Path) -> None:
    about = json.loads(_row(_read(tmp_path, VERL))["metadata"])
    assert about == {
        "ability": "MATH",
        "data_source": "math_dapo",
        "extra_info": {"index": "9a9b-0"},
        "reward_model": {"ground_truth": "1", "style": "rule-lighteval/MATH_v2"},
    }
    about = json.loads(_row(_read(tmp_path, MATH))["metadata"])
    assert about == {"level": "Level 1", "type": "Algebra", "solution": MATH[0]["solution"]}
    rows = [{"ask": f"{n}?", "ground_truth": f"It is {n}", "uid": f"u{n}"} for n in range(3)]
    columns = {"ask": "prompt", "ground_truth": "answer", "uid": "id"}
    row = _row(_read(tmp_path, rows, columns=columns, answer_pattern=r"is (\d)"))
    assert (row["id"], row["answer"]) == ("u0", "0")
    assert json.loads(row["metadata"]) == {"ground_truth": "It is 0", "uid": "u0"}
    assert json.loads(_row(_read(tmp_path, SQUAD))["metadata"])["answers"]["text"] == ["7", "some"]


def test_preferences_are_read_without_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        data = _read(tmp_path, HELPSTEER3)
    assert (data.kind, data.read_as.partition(":")[0]) == ("preferences", "helpsteer3")
    # -2: the first is better; 3 and 1: the second; 0 is a tie
    pairs = [(_row(data, n)["chosen"], _row(data, n)["rejected"]) for n in range(3)]
    assert pairs == [("one", "two"), ("two", "one"), ("two", "one")]
    assert "1 rows with equal scores are dropped" in caplog.text
    data = _read(tmp_path, ULTRAFEEDBACK)
    assert data.kind == "preferences"
    assert json.loads(_row(data)["prompt"]) == ULTRAFEEDBACK[0]["messages"][:1]
    assert json.loads(_row(data)["chosen"])[0]["content"] == "0!"


@pytest.mark.parametrize(
    ("rows", "read_as", "turns"),
    [
        (TULU, "conversations", ["Say 0.", "0!"]),
        (ALPACA, "alpaca", ["Say 0.\n\nLoudly", "0!"]),
        (SHAREGPT, "sharegpt", ["Be short.", "Say 0.", "0!"]),
    ],
)
def test_conversations_are_read_without_a_word(
    tmp_path: Path, rows: list[dict[str, Any]], read_as: str, turns: list[str]
) -> None:
    data = _read(tmp_path, rows)
    assert (data.kind, data.read_as.partition(":")[0]) == ("conversations", read_as)
    assert [turn["content"] for turn in json.loads(_row(data)["messages"])] == turns


CALL = {"name": "get_stock_price", "arguments": {"symbol": "AAPL"}}
RESULT = '{"stock_price": 150.75}'
CALLED = [
    {"role": "user", "content": "What does AAPL cost?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    },
    {"role": "tool", "content": RESULT},
    {"role": "assistant", "content": "$150.75"},
]


@pytest.mark.parametrize(
    "turns",
    [
        # glaive_toolcall of LLaMA-Factory
        [
            {"from": "human", "value": "What does AAPL cost?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": RESULT},
            {"from": "gpt", "value": "$150.75"},
        ],
        # xLAM: several calls, and arguments that are text
        [
            {"from": "Human", "value": "What does AAPL cost?"},
            {
                "from": "function-call",
                "value": json.dumps([{**CALL, "arguments": json.dumps(CALL["arguments"])}]),
            },
            {"from": "function-response", "value": RESULT},
            {"from": "GPT", "value": "$150.75"},
        ],
        # `conversations` with turns of OpenAI's current and earlier formats
        CALLED,
        [
            CALLED[0],
            {"role": "assistant", "content": None, "function_call": CALL},
            {"role": "function", "content": RESULT},
            CALLED[3],
        ],
    ],
)
def test_calls_of_tools_are_read_in_every_spelling(
    tmp_path: Path, turns: list[dict[str, Any]]
) -> None:
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": f"{n}", "conversations": each} for n, each in enumerate([turns, other])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (_read(tmp_path, rows), DataModule.of(path)):
        assert data.read_as.startswith("sharegpt")
        assert json.loads(_row(data)["messages"]) == CALLED


def test_flags_of_sharegpt_turns_are_kept(tmp_path: Path) -> None:
    # OpenHermes has OpenChat's weights: null, 0.0 and 1.0.
    turns = [
        {"from": "human", "value": "Say 1.", "weight": 0.0},
        {"from": "gpt", "value": "2!", "weight": 0.0},
        {"from": "human", "value": "Say 1.", "weight": None},
        {"from": "gpt", "value": "1!", "weight": 1.0},
    ]
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": f"{n}", "conversations": each} for n, each in enumerate([turns, other])]
    turns = json.loads(_row(_read(tmp_path, rows))["messages"])
    assert [turn.get("train") for turn in turns] == [False, False, None, True]


def test_two_readings_are_refused_with_both(tmp_path: Path) -> None:
    both = [{**row, **other} for row, other in zip(ALPACA, AIME_2025, strict=True)]
    for row in both:
        del row["text"]
    with pytest.raises(DataError) as caught:
        _read(tmp_path, both)
    assert "set data.format: question_answer or alpaca" in str(caught.value)
    assert _read(tmp_path, both, format="alpaca").kind == "conversations"
    columns = {"question": "prompt"}
    assert _row(_read(tmp_path, both, columns=columns, drop_columns=["input"]))["answer"] == "0"
    with pytest.raises(DataError, match="not in the format 'math'"):
        _read(tmp_path, both, format="math")
    # The column may be text to train on, or a question.
    with pytest.raises(DataError, match="text: plain text"):
        _read(tmp_path, [{**row, "text": "t"} for row in AIME_2025])


@pytest.mark.parametrize(
    ("rows", "broken", "message"),
    [
        (GSM8K, {"answer": "no mark"}, "1 of 4 rows have no answer of the pattern 'hashes'"),
        (MATH, {"solution": r"\boxed{1"}, "no answer of the pattern 'boxed'"),
        (HELPSTEER3, {"overall_preference": 7}, "row 4 has the overall_preference 7"),
        (SQUAD, {"answers": {"text": [], "answer_start": []}}, "row 3 has no answer"),
        (SHAREGPT, {"conversations": [{"from": "bing", "value": "x"}]}, "row 3 has a turn from"),
        (
            SHAREGPT,
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            "row 3 has text where JSON is expected",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], broken: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _read(tmp_path, [*rows, {**rows[0], **broken}])


def test_a_recipe_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    data = DataModule.of(FileData(train=str(path), validation_fraction=0.3))
    assert (len(data.train), len(data.validation)) == (2, 1)
    assert data.read_as.startswith("gsm8k")
