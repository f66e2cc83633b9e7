import json
import logging
from typing import Any

import pytest

from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.errors import DataError

USER = {"role": "user", "content": "2+2"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
MORE = [USER, FOUR, {"role": "user", "content": "3+3"}]


def _one(record: dict[str, Any]) -> dict[str, Any]:
    (row,) = recognize([record], where="here", task="t").rows
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
def test_columns_determine_the_rows(record: dict[str, Any], row: dict[str, Any]) -> None:
    assert _one(record) == row
    # Converted rows are read unchanged.
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
        (row,) = recognize(records, where="my rows", task="t").rows
    # The id is the index of the record, which counts the dropped tie before it.
    assert (row["id"], row["prompt"], row["chosen"]) == ("1", "q", "b")
    assert caplog.messages == [
        "my rows: scored responses, of which the best and the worst make a pair; "
        "2 rows with equal scores are dropped; ignored columns: source; "
        "text that is in neither prompt nor answer: source (write it with data.prompt_template, "
        "or remove it with data.drop_columns: [source])"
    ]


@pytest.mark.parametrize(
    ("record", "fragment"),
    [
        ({"prompt": "p", "responses": ["a"], "scores": [1, 2]}, "one score per response"),
        ({"prompt": "p", "responses": "a", "scores": [1]}, "one score per response"),
        ({"prompt": "p", "responses": ["a"], "scores": [float("nan")]}, "not a finite number"),
        ({"prompt": "p", "responses": ["a"], "scores": ["x"]}, "not a finite number"),
    ],
)
def test_scores_that_do_not_fit_are_refused_by_row(record: dict[str, Any], fragment: str) -> None:
    good = {"prompt": "p", "responses": ["a", "b"], "scores": [0, 1]}
    with pytest.raises(DataError, match="here: row 1 ") as caught:
        recognize([good, record], where="here", task="t")
    assert fragment in str(caught.value)


def test_unknown_columns_are_refused_with_the_known_formats() -> None:
    with pytest.raises(DataError) as caught:
        recognize([{"question": "q", "reply": "r"}], where="here", task="t")
    message = str(caught.value)
    assert "here lacks the column prompt and the column answer" in message
    assert "got: question, reply" in message
    for word in ("messages", "chosen and rejected", "responses and scores", "text", "completion"):
        assert word in message


def test_no_records_give_no_rows() -> None:
    assert recognize([], where="here", task="t").rows == []


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        # The question contains the word of the input by chance.
        ({"query": "A noun or a verb?", "input": "verb"}, "A noun or a verb?\n\nverb"),
        ({"query": "A noun?\nrun", "input": "run"}, "A noun?\nrun"),
        ({"instruction": "Where?", "context": ["In Rome.", "No."]}, "Where?\n\nIn Rome.\n\nNo."),
    ],
)
def test_short_inputs_are_kept_unless_they_are_lines(record: dict[str, Any], prompt: str) -> None:
    (row,) = recognize([{**record, "response": "x"}], where="here", task="t").rows
    assert row["prompt"] == prompt


def test_a_number_that_is_a_label_is_not_an_index() -> None:
    choices = {"text": ["Rome", "Oslo", "Bern"], "label": [1, 2, 3]}
    record = {"question": "Italy?", "choices": choices, "answerKey": 1}
    (row,) = recognize([record], where="here", task="t").rows
    assert row["answer"] == "A"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"info": {"id": "1"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
            "neither info.post nor info.article",
        ),
        ({"Body": None, "Question": "How many?", "Answer": "7"}, "no text in Body or Question"),
        (
            {"prompt": "Be brief.", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
            "has a prompt that the conversations chosen and rejected do not repeat",
        ),
    ],
)
def test_questions_without_their_text_are_refused(record: dict[str, Any], message: str) -> None:
    other = {**record, "Body": "87 oranges."} if "Body" in record else record
    with pytest.raises(DataError, match=message):
        recognize([other, record], where="here", task="t")


def test_answers_may_be_one_spelling_or_several() -> None:
    records = [{"question": "Italy?", "answer": answer} for answer in (["Rome", "Roma"], "Rome")]
    rows = recognize(records, where="here", task="t").rows
    assert [row["answer"] for row in rows] == ["Rome", "Rome"]
