"""What rows must be, checked before any worker starts."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pandera.pandas as pa

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

COLUMNS = ("id", "prompt", "answer", "completion", "task", "metadata")
_SHOWN = 4


def _filled(name: str) -> pa.Column:
    not_blank = pa.Check(lambda text: text.str.strip() != "", name=f"{name} is not empty")
    return pa.Column(str, not_blank)


PromptSchema = pa.DataFrameSchema(
    {
        "id": pa.Column(str, unique=True),
        "prompt": pa.Column(
            str,
            pa.Check(lambda text: text.str.strip() != "", name="prompt is not empty"),
            unique=True,
        ),
        "answer": _filled("answer"),
        "completion": _filled("completion"),
        "task": _filled("task"),
        "metadata": pa.Column(str),
    },
    strict=True,
)


def validate_rows(
    rows: Sequence[Row], *, tokenizer: Any, max_prompt_tokens: int, name: str
) -> pd.DataFrame:
    """Rows as a frame, every one of them good.

    Args:
        rows: With the columns of `PromptSchema`.
        tokenizer: Measures prompts, chat template included.
        max_prompt_tokens: No prompt may be longer.
        name: The word for this data set in messages.

    Raises:
        DataError: Naming the checks that failed and the first rows, counted from 0.
    """
    if not rows:
        raise DataError(
            f"the {name} data set is empty",
            expected="at least one row",
            fix="check the path, or the filters that made it",
        )
    frame = pd.DataFrame(list(rows))
    schema = PromptSchema.add_columns(
        {"prompt": _bounded(PromptSchema.columns["prompt"], tokenizer, max_prompt_tokens)}
    )
    try:
        return schema.validate(frame, lazy=True)[list(COLUMNS)]
    except pa.errors.SchemaErrors as error:
        raise _explain(error, name) from error


def _bounded(column: pa.Column, tokenizer: Any, max_prompt_tokens: int) -> pa.Column:
    def fits(text: pd.Series) -> pd.Series:
        return text.map(lambda t: len(prompt_token_ids(tokenizer, t)) <= max_prompt_tokens)

    length = pa.Check(fits, name=f"prompt has at most {max_prompt_tokens} tokens")
    return pa.Column(str, [*column.checks, length], unique=True)


def _explain(error: pa.errors.SchemaErrors, name: str) -> DataError:
    cases = error.failure_cases
    lines = []
    for check, group in list(cases.groupby("check", sort=False))[:_SHOWN]:
        rows = sorted({int(index) for index in group["index"].dropna()})
        column = group["column"].iloc[0]
        if not rows:
            lines.append(f"{check}: {group['failure_case'].iloc[0]}")
            continue
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        shown = ", ".join(str(row) for row in rows[:_SHOWN])
        lines.append(f"column {column!r}, check '{check}': row {shown}{more}")
    return DataError(
        f"the {name} data set has rows that cannot be used:\n  " + "\n  ".join(lines),
        expected=f"columns {', '.join(COLUMNS)}, filled, without duplicate prompts",
        fix="mend or drop these rows, or raise data.max_prompt_tokens",
    )


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Refuses validation prompts that are also trained on.

    Raises:
        DataError: Naming the first rows of the validation set that are.
    """
    trained = {row["prompt"] for row in train}
    shared = [place for place, row in enumerate(validation) if row["prompt"] in trained]
    if shared:
        raise DataError(
            f"{len(shared)} validation prompts are also in the training data",
            got=f"validation rows {', '.join(map(str, shared[:_SHOWN]))}",
            fix="remove them from one of the two; accuracy on them would mean nothing",
        )
