import json
import logging
from typing import Any

import pytest

from nemo_rl_core.data.datasets.formats import recognise
from nemo_rl_core.errors import DataError

USER = {"role": "user", "content": "2+2"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
MORE = [USER, FOUR, {"role": "user", "content": "3+3"}]


def _one(record: dict[str, Any]) -> dict[str, Any]:
    (row,) = recognise([record], where="here", task="t").rows
    assert (row.pop("id"), row.pop("task"), row.pop("metadata")) == ("0", "t", "{}")
    return row


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"prompt": "p", "answer": 4}, {"prompt": "p", "answer": "4", "completion": "4"}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "answer": "c", "completion": "c"}),
        (
            {"prompt": "p", "answer": "4", "completion": "so 4"},
            {"prompt": "p", "answer": "4", "completion": "so 4"},
        ),
        (
            {"prompt": MORE, "answer": 6},
            {"prompt": json.dumps(MORE), "answer": "6", "completion": "6"},
        ),
        (
            {"prompt": [USER], "completion": [FOUR]},
            {"prompt": json.dumps([USER]), "answer": "4", "completion": "4"},
        ),
        ({"messages": [USER, FOUR]}, {"messages": json.dumps([USER, FOUR])}),
        ({"messages": json.dumps([USER, FOUR])}, {"messages": json.dumps([USER, FOUR])}),
        ({"text": "abc"}, {"text": "abc"}),
        (
            {"prompt": "p", "chosen": "4", "rejected": "5", "margin": "0.5"},
            {"prompt": "p", "chosen": "4", "rejected": "5", "margin": 0.5},
        ),
        (
            {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
            {
                "prompt": json.dumps([USER]),
                "chosen": json.dumps([FOUR]),
                "rejected": json.dumps([FIVE]),
            },
        ),
        (  # The prompt is all that the two conversations share.
            {"chosen": [*MORE, FOUR], "rejected": [*MORE, FIVE]},
            {
                "prompt": json.dumps(MORE),
                "chosen": json.dumps([FOUR]),
                "rejected": json.dumps([FIVE]),
            },
        ),
        (  # A named prompt that the pair repeats.
            {"prompt": "2+2", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
            {
                "prompt": json.dumps([USER]),
                "chosen": json.dumps([FOUR]),
                "rejected": json.dumps([FIVE]),
            },
        ),
        (  # Equal pairs keep an answer, so that the schema sees two equal ones.
            {"chosen": [USER, FOUR], "rejected": [USER, FOUR]},
            {
                "prompt": json.dumps([USER]),
                "chosen": json.dumps([FOUR]),
                "rejected": json.dumps([FOUR]),
            },
        ),
        (  # "t" begins both answers, and belongs to them.
            {"chosen": "Q: 2+2\nA: two", "rejected": "Q: 2+2\nA: ten"},
            {"prompt": "Q: 2+2\nA:", "chosen": " two", "rejected": " ten"},
        ),
        (
            {"prompt": "p", "responses": ["a", "b", "c"], "scores": [1, 3, 0.5]},
            {"prompt": "p", "chosen": "b", "rejected": "c"},
        ),
        (
            {"prompt": "p", "responses": '["a", "b"]', "scores": "[0, 1]"},
            {"prompt": "p", "chosen": "b", "rejected": "a"},
        ),
    ],
)
def test_columns_say_what_rows_are(record: dict[str, Any], row: dict[str, Any]) -> None:
    assert _one(record) == row
    # What has been read once is read the same again.
    assert _one(row) == row


def test_ties_are_dropped_and_counted_and_other_columns_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [
        {"prompt": "p", "responses": ["a", "b"], "scores": [1, 1], "source": "x"},
        {"prompt": "q", "responses": ["a", "b"], "scores": [1, 2], "source": "x"},
        {"prompt": "r", "responses": ["a"], "scores": [1], "source": "x"},
    ]
    with caplog.at_level(logging.WARNING):
        (row,) = recognise(records, where="my rows", task="t").rows
    # The id is the number of the record, so the tie before it is not forgotten.
    assert (row["id"], row["prompt"], row["chosen"]) == ("1", "q", "b")
    assert caplog.messages == [
        "my rows: scored responses, paired best against worst; "
        "2 rows whose scores are all equal are dropped; columns that are ignored: source"
    ]


@pytest.mark.parametrize(
    ("record", "fragment"),
    [
        ({"prompt": "p", "responses": ["a"], "scores": [1, 2]}, "as many scores as responses"),
        ({"prompt": "p", "responses": "a", "scores": [1]}, "as many scores as responses"),
        ({"prompt": "p", "responses": ["a"], "scores": [float("nan")]}, "not a finite number"),
        ({"prompt": "p", "responses": ["a"], "scores": ["x"]}, "not a finite number"),
    ],
)
def test_scores_that_do_not_fit_are_refused_by_row(record: dict[str, Any], fragment: str) -> None:
    good = {"prompt": "p", "responses": ["a", "b"], "scores": [0, 1]}
    with pytest.raises(DataError, match="here: row 1 ") as caught:
        recognise([good, record], where="here", task="t")
    assert fragment in str(caught.value)


def test_unknown_columns_are_refused_with_what_is_understood() -> None:
    with pytest.raises(DataError) as caught:
        recognise([{"question": "q", "reply": "r"}], where="here", task="t")
    message = str(caught.value)
    assert "here lacks the column prompt and the column answer" in message
    assert "got: question, reply" in message
    for word in ("messages", "chosen and rejected", "responses and scores", "text", "completion"):
        assert word in message


def test_no_records_give_no_rows() -> None:
    assert recognise([], where="here", task="t").rows == []
