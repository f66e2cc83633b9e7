"""What a row must hold, and messages that name the rows that do not."""

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors
from pandera.typing import Series

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

COLUMNS = ("id", "prompt", "answer", "completion", "task", "metadata")
"""The columns of a data set, in the order in which they are stored."""

_NUM_NAMED_ROWS = 5
_NUM_NAMED_CHECKS = 6


def _is_json_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


class PromptSchema(pa.DataFrameModel):
    """A row that can be sampled from and scored."""

    id: Series[str]
    prompt: Series[str]
    answer: Series[str]
    completion: Series[str]
    task: Series[str]
    metadata: Series[str]

    @pa.check("prompt", "answer", name="is empty")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805 (pandera binds the class)
        return _has_text(column)

    @pa.check("id", "prompt", name="occurs twice")
    def _unique(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return ~column.duplicated()

    @pa.check("metadata", name="is not a JSON object")
    def _json(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return column.map(_is_json_object)


class SftSchema(PromptSchema):
    """A row that can also be trained on with supervision."""

    @pa.check("completion", name="is empty")
    def _can_be_trained_on(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


def _has_text(column: Series[str]) -> "pd.Series[bool]":
    # What is no text at all fails the check of its type, with its row, and not this one.
    return column.map(lambda value: not isinstance(value, str) or bool(value.strip()))


def validate_rows(
    rows: Sequence[Row], *, tokenizer: Any, max_prompt_tokens: int, name: str
) -> pd.DataFrame:
    """Checks rows and returns them as a frame.

    Args:
        rows: Mappings with at least the keys of `COLUMNS`.
        tokenizer: The model's tokenizer: lengths are counted as the model will see them.
        max_prompt_tokens: The longest prompt allowed, chat template included.
        name: What to call the data set in a message, such as `train`.

    Returns:
        The columns of `COLUMNS`, in the order of the rows.

    Raises:
        DataError: Names the rows (counted from 0) and the checks that they fail.
    """
    if not rows:
        raise DataError(
            f"the {name} data set is empty",
            expected="at least one row",
            got="0 rows",
            fix="check the file, or raise num_train and num_validation",
        )
    frame = pd.DataFrame(list(rows))
    frame = frame[[column for column in COLUMNS if column in frame.columns]]
    # A column of only numbers or only nulls keeps its type, so that the schema can refuse it.
    counts = [_token_counts(tokenizer, row.get("prompt")) for row in rows]
    frame = frame.assign(
        num_prompt_tokens=[count for count, _ in counts],
        num_unknown_tokens=[unknown for _, unknown in counts],
    )
    too_long = f"has more than {max_prompt_tokens} tokens (max_prompt_tokens)"
    schema = SftSchema.to_schema().add_columns(
        {
            "num_prompt_tokens": pa.Column(
                int, pa.Check(lambda counts: counts <= max_prompt_tokens, name=too_long)
            ),
            "num_unknown_tokens": pa.Column(
                int, pa.Check(lambda counts: counts == 0, name="has unknown characters")
            ),
        }
    )
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        raise _describe(error, name) from None
    return frame[list(COLUMNS)]


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Refuses a validation set that shares prompts with the training set.

    Raises:
        DataError: Names the first shared rows of the validation set, counted from 0.
    """
    trained = {row["prompt"] for row in train}
    shared = [place for place, row in enumerate(validation) if row["prompt"] in trained]
    if shared:
        example = validation[shared[0]]["prompt"]
        raise DataError(
            f"{len(shared)} of {len(validation)} validation prompts are in the training data too, "
            "so accuracy would be measured on what was trained on",
            expected="no prompt in both",
            got=f"validation rows {_numbers(shared)}; the first is {example[:80]!r}",
            fix="remove these rows from one of the two",
        )


def _token_counts(tokenizer: Any, prompt: Any) -> tuple[int, int]:
    if not isinstance(prompt, str):
        return 0, 0
    ids = prompt_token_ids(tokenizer, prompt)
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    # Some tokenizers share one id between "unknown" and, say, end-of-text: it then says nothing.
    unknown = tokenizer.unk_token_id
    return len(ids), 0 if unknown is None or unknown in special else ids.count(unknown)


_WORDS = {
    "column_in_dataframe": "is missing from every row",
    "not_nullable": "is missing or null",
}


def _describe(error: SchemaErrors, name: str) -> DataError:
    cases = error.failure_cases
    failures: dict[str, list[int]] = {}
    for column, check, case, index in zip(
        cases["column"], cases["check"], cases["failure_case"], cases["index"], strict=True
    ):
        column_name = case if check == "column_in_dataframe" else column
        said = "is not text" if str(check).startswith("dtype") else _WORDS.get(check, str(check))
        subject = "prompt" if str(column_name).startswith("num_") else column_name
        rows = failures.setdefault(f"{subject} {said}", [])
        if pd.notna(index) and int(index) not in rows:
            rows.append(int(index))
    lines = [
        text + (f": rows {_numbers(sorted(rows))}" if rows else "")
        for text, rows in list(failures.items())[:_NUM_NAMED_CHECKS]
    ]
    count = f"{len(failures)} checks" if len(failures) > 1 else "a check"
    more = f", of which the first {len(lines)} are" if len(failures) > len(lines) else ""
    return DataError(
        f"the {name} data set fails {count}{more}:\n    " + "\n    ".join(lines),
        fix="mend or remove these rows (counted from 0)",
    )


def _numbers(rows: list[int]) -> str:
    named = ", ".join(str(row) for row in rows[:_NUM_NAMED_ROWS])
    hidden = len(rows) - _NUM_NAMED_ROWS
    return f"{named} and {hidden} more" if hidden > 0 else named
