from typing import Any

import pytest

from nemo_rl_core.data.schemas import COLUMNS, check_disjoint, validate_rows
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

TOKENIZER = build_arithmetic_tokenizer()


def _rows(count: int = 8) -> list[Row]:
    return [
        {
            "id": str(number),
            "prompt": f"{number}+1=",
            "answer": str(number + 1),
            "completion": str(number + 1),
            "task": "arithmetic",
            "metadata": "{}",
        }
        for number in range(count)
    ]


def _check(rows: list[Row], max_prompt_tokens: int = 5) -> Any:
    # bos and four characters: 5 tokens
    return validate_rows(
        rows, tokenizer=TOKENIZER, max_prompt_tokens=max_prompt_tokens, name="train"
    )


def test_good_rows_come_back_in_order_with_the_columns_alone() -> None:
    rows = [{**row, "extra": 1} for row in _rows()]
    frame = _check(rows)
    assert tuple(frame.columns) == COLUMNS
    assert frame["prompt"].tolist() == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ""}, "prompt is empty: rows 3"),
        ({"prompt": " \n"}, "prompt is empty: rows 3"),
        ({"prompt": None}, "prompt is missing or null: rows 3"),
        ({"prompt": 7}, "prompt is not text: rows 3"),
        ({"prompt": "0+1="}, "prompt occurs twice: rows 3"),
        ({"prompt": "10+1="}, "prompt has more than 5 tokens (max_prompt_tokens): rows 3"),
        ({"prompt": "x+1="}, "prompt has unknown characters: rows 3"),
        ({"answer": ""}, "answer is empty: rows 3"),
        ({"answer": float("nan")}, "answer is missing or null: rows 3"),
        ({"answer": ["4"]}, "answer is not text: rows 3"),
        ({"completion": ""}, "completion is empty: rows 3"),
        ({"id": "0"}, "id occurs twice: rows 3"),
        ({"task": None}, "task is missing or null: rows 3"),
        ({"metadata": "[1]"}, "metadata is not a JSON object: rows 3"),
        ({"metadata": "{"}, "metadata is not a JSON object: rows 3"),
    ],
)
def test_a_bad_row_is_named_with_its_check(changes: Row, said: str) -> None:
    rows = _rows()
    rows[3].update(changes)
    with pytest.raises(DataError) as caught:
        _check(rows)
    message = str(caught.value)
    assert said in message
    assert "the train data set" in message
    assert len(message.splitlines()) < 10


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_named(column: str) -> None:
    rows = [{key: value for key, value in row.items() if key != column} for row in _rows()]
    with pytest.raises(DataError, match=f"{column} is missing"):
        _check(rows)


def test_many_faults_stay_under_ten_lines_and_name_the_first_rows() -> None:
    rows: list[Row] = [
        {"id": "same", "prompt": "", "answer": "", "completion": "", "task": 1, "metadata": "x"}
    ] * 9
    with pytest.raises(DataError) as caught:
        _check([*rows, {**rows[0], "prompt": "9" * 99}])
    message = str(caught.value)
    assert len(message.splitlines()) < 10
    assert "id occurs twice: rows 1, 2, 3, 4, 5 and 4 more" in message


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="the train data set is empty"):
        _check([])


def test_prompts_in_both_sets_are_refused() -> None:
    train, validation = _rows(8)[:6], _rows(8)[4:]
    with pytest.raises(DataError) as caught:
        check_disjoint(train, validation)
    # Prompts 4 and 5 are in both: rows 0 and 1 of the validation set.
    assert "2 of 4 validation prompts" in str(caught.value)
    assert "rows 0, 1; the first is '4+1='" in str(caught.value)
    check_disjoint(_rows(8)[:4], _rows(8)[4:])
