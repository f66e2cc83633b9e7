import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.checking import COLUMNS
from nemo_rl_core.data.frames import row_kind
from nemo_rl_core.data.schemas import check_disjoint
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row
from tests.validated import validate_rows

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


def test_unknown_characters_are_named_with_the_tokenizer_and_the_fixes() -> None:
    rows = _rows()
    rows[1]["prompt"], rows[3]["prompt"] = "ab=", "b\u00e9="
    with pytest.raises(DataError) as caught:
        _check(rows)
    assert str(caught.value).splitlines() == [
        "the train data set fails a check:",
        "    prompt has unknown characters: rows 1, 3",
        "  got: 'a', 'b', '\u00e9'; the model's tokenizer knows only ' *+-0123456789='",
        "  fix: correct or remove these rows (counted from 0), or use a model that reads any "
        "text: model: {kind: text_from_config} or a pretrained one, model: {name: FOLDER}",
    ]


def test_the_fix_of_long_prompts_names_the_setting_and_its_minimum() -> None:
    rows = _rows()
    rows[1]["prompt"], rows[3]["prompt"] = "100+1=", "10+1="  # with bos: 7 and 6 tokens
    with pytest.raises(DataError, match=r"more than 5 tokens \(max_prompt_tokens\)") as caught:
        _check(rows)
    assert caught.value.fix == (
        "raise data.max_prompt_tokens to at least 7, or drop these rows: data.overlong: drop"
    )
    assert len(_check(rows, max_prompt_tokens=7)) == len(rows)
    with pytest.raises(DataError, match="rows 1"):
        _check(rows, max_prompt_tokens=6)


def test_all_faults_are_reported_together_with_their_file_and_fixes() -> None:
    """Also repeated rows without another fault; another model fixes only unknown characters."""
    rows = [row for _ in range(2) for row in _rows()[:2]]
    rows += [{**_rows()[3], "prompt": text} for text in ("", "b=", "b=")]
    for number, row in enumerate(rows):
        row["id"] = str(number)
    with pytest.raises(DataError) as caught:
        validate_rows(
            rows, tokenizer=TOKENIZER, max_prompt_tokens=5, name="train", source="rows.jsonl"
        )
    assert str(caught.value).splitlines() == [
        "the train data set fails 3 checks:",
        "    prompt is empty: rows 4",
        "    prompt has unknown characters: rows 5, 6",
        "    prompt occurs twice: rows 2, 3",
        "  got: 'b'; the model's tokenizer knows only ' *+-0123456789='",
        "  fix: correct or remove these rows of rows.jsonl (counted from 0), or, for the unknown "
        "characters, use a model that reads any text: "
        "model: {kind: text_from_config} or a pretrained one, model: {name: FOLDER}",
    ]


def test_valid_rows_are_returned_in_order_with_only_their_columns() -> None:
    rows = [{**row, "extra": 1} for row in _rows()]
    frame = _check(rows)
    assert tuple(frame.columns) == COLUMNS
    assert frame["prompt"].tolist() == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("changes", "fragment"),
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
        ({"prompt": "\ud800="}, "prompt holds half of a surrogate pair: rows 3"),
        ({"answer": "4\udfff"}, "answer holds half of a surrogate pair: rows 3"),
        ({"metadata": {"a": ["\ud800"]}}, "metadata holds half of a surrogate pair: rows 3"),
        ({"completion": ""}, "completion is empty: rows 3"),
        ({"id": "0"}, "id occurs twice: rows 3"),
        ({"task": None}, "task is missing or null: rows 3"),
        (
            {"metadata": "[1]"},
            "metadata is not a JSON object (data.drop_columns",
        ),
        (
            {"metadata": "{"},
            "metadata is not a JSON object (data.drop_columns",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_check(changes: Row, fragment: str) -> None:
    rows = _rows()
    rows[3].update(changes)
    with pytest.raises(DataError) as caught:
        _check(rows)
    message = str(caught.value)
    assert fragment in message
    assert "the train data set" in message
    assert len(message.splitlines()) < 10


def test_prompts_that_a_template_drops_are_named_together() -> None:
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if '7' in m['content'] %}1{% endif %}" + (
        "{% endfor %}"
    )
    with pytest.raises(DataError) as caught:
        validate_rows(_rows(), tokenizer=tokenizer, max_prompt_tokens=5, name="train")
    fragment = (
        "prompt has no tokens; got: a chat template that writes nothing: rows 0, 1, 2, 3, 4 and 2"
    )
    assert fragment in str(caught.value)


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


def _turns(*texts: str) -> str:
    roles = ("user", "assistant") * len(texts)
    return json.dumps(
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    )


def _as_rows(*contents: Row) -> list[Row]:
    return [
        {"id": str(number), "task": "t", "metadata": "{}", **content}
        for number, content in enumerate(contents)
    ]


def _validate(rows: list[Row], **policy: Any) -> Any:
    return validate_rows(
        rows,
        tokenizer=TOKENIZER,
        max_prompt_tokens=None,
        name="train",
        policy=RowPolicy(**policy),
    )


CONVERSATION: Row = {"messages": _turns("1+1=", "2")}
SUM: Row = {"prompt": "1+1=", "answer": "2", "completion": "2"}
PAIR: Row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("good", "bad", "fragment"),
    [
        (CONVERSATION, {"messages": "hello"}, "messages is not a list of messages: rows 1"),
        (CONVERSATION, {"messages": 7}, "messages is not text: rows 1"),
        (CONVERSATION, {"messages": _turns("1", " ")}, "messages has an empty turn: rows 1"),
        (
            CONVERSATION,
            {"messages": _turns("1")},
            "{messages: prompt, COLUMN: answer}",
        ),
        (CONVERSATION, CONVERSATION, "conversation up to its last turn occurs twice: rows 1"),
        (PAIR, {**PAIR, "prompt": "2"} | {"rejected": "2"}, "chosen equals rejected: rows 1"),
        (PAIR, {**PAIR, "chosen": ""}, "chosen is empty: rows 1"),
        (PAIR, {**PAIR, "rejected": None}, "rejected is missing or null: rows 1"),
        (PAIR, PAIR, "pair occurs twice: rows 1"),
        (PAIR, {**PAIR, "prompt": _turns("1", "2")}, "has role 'assistant' after 'assistant'"),
        ({**PAIR, "margin": 1.0}, {**PAIR, "prompt": "3", "margin": -1.0}, "margin"),
        (SUM, {**SUM, "prompt": _turns("1", "2")}, "prompt has role 'assistant' after 'assistant'"),
        ({"text": "1"}, {"text": " "}, "text is empty: rows 1"),
        ({"text": "1"}, {"text": "1"}, "text occurs twice: rows 1"),
    ],
)
def test_other_kinds_name_their_bad_rows(good: Row, bad: Row, fragment: str) -> None:
    with pytest.raises(DataError) as caught:
        _validate(_as_rows(good, bad))
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_pairs_may_share_a_prompt() -> None:
    frame = _validate(_as_rows(PAIR, {**PAIR, "rejected": "4"}))
    assert len(frame) == 2
    assert tuple(frame.columns) == ("id", "prompt", "chosen", "rejected", "task", "metadata")


def test_margins_are_kept_as_numbers() -> None:
    frame = _validate(_as_rows({**PAIR, "margin": 0.5}))
    assert frame["margin"].tolist() == [0.5]


# <bos> 1 + 1 = 2 <eos>: 7 tokens, of which the last two are trained on; the long one has 10.
LONG: Row = {"messages": _turns("1+1+1+1=", "4")}


@pytest.mark.parametrize(
    ("policy", "fragment"),
    [
        ({}, "row has more than 7 tokens (max_sequence_tokens): rows 1"),
        # Cut at 7 tokens, the long row ends inside its prompt.
        ({"overlong": "truncate"}, "row has no token that is trained on: rows 1"),
    ],
)
def test_long_rows_are_refused_by_number(policy: Row, fragment: str) -> None:
    with pytest.raises(DataError) as caught:
        _validate(_as_rows(CONVERSATION, LONG), max_sequence_tokens=7, **policy)
    assert fragment in str(caught.value)


def test_long_rows_are_dropped_or_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    longer: Row = {"messages": _turns("1+2=", "3+0+0")}
    rows = _as_rows(CONVERSATION, longer, {"messages": _turns("2+2=", "4")})
    with caplog.at_level("WARNING"):
        dropped = _validate(rows, max_sequence_tokens=7, overlong="drop")
        cut = _validate(rows, max_sequence_tokens=7, overlong="truncate")
    assert dropped["id"].tolist() == ["0", "2"]
    assert dropped.index.tolist() == [0, 1]
    assert "max_tokens" not in dropped
    assert cut["id"].tolist() == ["0", "1", "2"]
    assert cut["max_tokens"].tolist() == [7, 7, 7]
    assert "1 rows dropped: row has more than 7 tokens" in caplog.text
    assert "1 rows cut at 7 tokens" in caplog.text
    # <bos> 1 + 2 = then 3 and +: the end is cut off.
    example = tokenize_row(TOKENIZER, cut.to_dict("records")[1])["row"]
    assert TOKENIZER.decode(list(example.token_ids)) == "<bos>1+2=3+"
    assert example.loss_mask == (False,) * 5 + (True,) * 2


def test_a_prompt_to_sample_from_is_dropped_or_refused_but_never_cut() -> None:
    rows = [*_rows(3), {**_rows(4)[3], "prompt": "10+10="}]

    def check(overlong: str) -> Any:
        policy = RowPolicy(overlong=overlong)
        return validate_rows(
            rows, tokenizer=TOKENIZER, max_prompt_tokens=5, name="train", policy=policy
        )

    assert len(check("drop")) == 3
    with pytest.raises(DataError, match="more than 5 tokens"):
        check("truncate")


def test_repeated_rows_are_dropped_or_kept_when_asked() -> None:
    rows = _as_rows({"text": "1"}, {"text": "2"}, {"text": "1"})
    assert _validate(rows, duplicates="drop")["id"].tolist() == ["0", "1"]
    assert _validate(rows, duplicates="keep")["id"].tolist() == ["0", "1", "2"]


def test_nothing_left_is_refused() -> None:
    with pytest.raises(DataError, match="no rows left") as caught:
        _validate(_as_rows(LONG), max_sequence_tokens=3, overlong="drop")
    assert "max_sequence_tokens" in str(caught.value)


def test_pairs_and_conversations_in_both_sets_are_refused() -> None:
    other = {**PAIR, "chosen": "22"}
    with pytest.raises(DataError, match="1 of 1 validation prompts"):
        check_disjoint(_as_rows(PAIR), _as_rows(other))
    same = {"messages": _turns("1+1=", "two")}
    with pytest.raises(DataError, match="1 of 1 validation prompts"):
        check_disjoint(_as_rows(CONVERSATION), _as_rows(same))
    # Answers with the same first word do not share a question.
    further = {"messages": _turns("1+1=", "2", "2+2=", "4")}
    check_disjoint(_as_rows(CONVERSATION), _as_rows(further))


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (COLUMNS, "prompts"),
        (("id", "messages"), "conversations"),
        (("id", "text"), "text"),
        (("prompt", "chosen", "rejected"), "preferences"),
    ],
)
def test_columns_tell_the_kind(columns: tuple[str, ...], kind: str) -> None:
    assert row_kind(columns) == kind


def test_pairs_of_equal_tokens_are_dropped_and_counted(
    byte_tokenizer: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [("4", "5"), ("6 ", "6"), ("abcdefghi", "abcdefghj")]
    rows = [
        {"id": str(n), "prompt": f"{n}?", "chosen": better, "rejected": worse, "task": "t",
         "metadata": "{}"}
        for n, (better, worse) in enumerate(pairs)
    ]  # fmt: skip
    # A prompt has 25 tokens, and the template trims.
    policy = RowPolicy(max_sequence_tokens=33, overlong="truncate")
    with caplog.at_level(logging.WARNING):
        frame = validate_rows(
            rows,
            tokenizer=byte_tokenizer("headers"),
            max_prompt_tokens=None,
            name="train",
            policy=policy,
        )
    assert frame["id"].tolist() == ["0"]
    assert "train data set: 1 rows dropped: chosen and rejected have equal tokens" in caplog.text
    dropped = "1 rows dropped: chosen and rejected have equal tokens after cutting at 33"
    assert dropped in caplog.text
    with pytest.raises(DataError, match="no rows left"):
        validate_rows(
            rows[1:2], tokenizer=byte_tokenizer("headers"), max_prompt_tokens=None, name="train"
        )
