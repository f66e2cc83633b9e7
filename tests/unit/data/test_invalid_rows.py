"""Rows that do not fit: refused by default, dropped and counted with `invalid: drop`."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_core.config.data import FileData, MixtureData
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.datasets import load_parts
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError

DROP = RowPolicy(invalid="drop")
NUM_ROWS = 20
FIRST_USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CALLING = [FIRST_USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": {}}]}]
THINKING = [FIRST_USER, {**ANSWER, "reasoning_content": "Be kind."}]


def _gsm(n: int) -> dict[str, Any]:
    return {"question": f"{n}+1?", "answer": f"It is\n#### {n + 1}"}


def _squad(n: int) -> dict[str, Any]:
    answers = {"text": ["Rome"], "answer_start": [0]}
    return {"context": f"Text {n}", "question": f"Where is {n}?", "answers": answers}


def _pair(n: int) -> dict[str, Any]:
    return {"prompt": f"Say {n}", "chosen": "yes", "rejected": "no"}


def _question_pair(n: int) -> dict[str, Any]:
    return {"question": f"Say {n}", "chosen": "It is so", "rejected": "It is not"}


def _choice(n: int) -> dict[str, Any]:
    return {"question": f"Which is {n}?", "choices": ["a", "b"], "answer": 1}


def _conversation(n: int) -> dict[str, Any]:
    user = {"role": "user", "content": f"Say {n}"}
    return {"messages": [user, {"role": "assistant", "content": "yes"}]}


def _with_content(n: int) -> dict[str, Any]:
    turns = [{"from": "human", "value": f"In {n}: who?"}, {"from": "gpt", "value": "I"}]
    return {"conversations": turns, "context": f"In {n}"}


CASES: list[tuple[Callable[[int], dict[str, Any]], dict[str, Any], str]] = [
    (_gsm, {"answer": "no mark"}, "no answer of the pattern 'hashes'"),
    (_squad, {"answers": {"text": [], "answer_start": []}}, "has no answer in answers.text"),
    (_pair, {"rejected": "yes"}, "chosen equals rejected"),
    (_pair, {"prompt": ""}, "prompt is empty"),
    (_question_pair, {"question": None}, "prompt is missing or null"),
    (_choice, {"answer": 7}, "has the answer 7, which is none of the choices"),
    (_conversation, {"messages": [FIRST_USER]}, "does not end with an assistant turn"),
    (_choice, {"choices": []}, "has no choices, but other rows have some"),
    (_with_content, {"conversations": [{"from": "bing", "value": "x"}]}, "has a turn from 'bing'"),
]
LOST = [
    (
        _conversation,
        {"tools": [{"name": "add"}]},
        "has tools that the chat template does not write",
    ),
    (_conversation, {"context": "A text."}, "has context, which would not reach the model"),
    (_pair, {"documents": ["A text."]}, "has documents, which would not reach the model"),
    (_conversation, {"messages": CALLING}, "has tool_calls in a turn of 'assistant'"),
    (_conversation, {"messages": THINKING}, "has reasoning_content in a turn of 'assistant'"),
]


@pytest.mark.parametrize("is_file", [False, True], ids=["rows", "parquet"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[2])[:30])
def test_invalid_rows_are_refused_or_dropped_with_their_reason(
    case: tuple[Callable[[int], dict[str, Any]], dict[str, Any], str],
    is_file: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad, reason = case
    rows = [good(n) for n in range(NUM_ROWS)]
    rows[3] |= bad
    source: Any = rows
    if is_file:
        source = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
    with pytest.raises(DataError, match=r"data\.invalid: drop") as caught:
        DataModule.of(source)
    assert reason in str(caught.value)
    with caplog.at_level(logging.WARNING):
        data = DataModule.of(source, policy=DROP)
    kept = {str(n) for n in range(NUM_ROWS) if n != 3}
    assert {*data.train["id"], *data.validation["id"]} == kept
    assert f"1 of {NUM_ROWS} rows dropped" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: str(case[2])[:30])
def test_more_than_a_tenth_of_invalid_rows_is_refused(
    case: tuple[Callable[[int], dict[str, Any]], dict[str, Any], str],
) -> None:
    good, bad, reason = case
    rows = [good(n) | (bad if n < 3 else {}) for n in range(NUM_ROWS)]
    with pytest.raises(DataError, match=r"data\.invalid: drop allows at most 10 %") as caught:
        DataModule.of(rows, policy=DROP)
    assert reason in str(caught.value)


def test_the_record_of_a_run_says_which_rows_were_dropped(tmp_path: Path) -> None:
    rows = [_gsm(n) for n in range(NUM_ROWS)]
    rows[3]["answer"] = "no mark"
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    dropped = "1 of 20 rows dropped: no answer of the pattern 'hashes'"
    assert load_parts(FileData(train=path, invalid="drop"), seed=0).read_as.endswith(dropped)
    source = {"data": {"kind": "file", "train": path}}
    mixture = MixtureData.model_validate({"sources": [source], "invalid": "drop"})
    assert load_parts(mixture, seed=0).read_as.endswith(dropped)


@pytest.mark.parametrize("case", LOST, ids=lambda case: str(case[2])[:30])
def test_rows_whose_content_would_be_lost_are_dropped(
    case: tuple[Callable[[int], dict[str, Any]], dict[str, Any], str],
    byte_tokenizer: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad, reason = case
    rows = [good(n) | (bad if n == 3 else {}) for n in range(NUM_ROWS)]
    tokenizer = byte_tokenizer("chatml")
    with pytest.raises(DataError, match="would not reach the model"):
        DataModule.of(rows, tokenizer=tokenizer)
    with caplog.at_level(logging.WARNING):
        data = DataModule.of(rows, tokenizer=tokenizer, policy=DROP)
    assert {*data.train["id"], *data.validation["id"]} == {*map(str, range(NUM_ROWS))} - {"3"}
    assert f"1 of {NUM_ROWS} rows dropped" in caplog.text
    assert reason in caplog.text
    many = [good(n) | (bad if n < 6 else {}) for n in range(NUM_ROWS)]
    policy = RowPolicy(invalid="drop", duplicates="keep")
    with pytest.raises(DataError, match="would not reach the model"):
        DataModule.of(many, tokenizer=tokenizer, policy=policy)
