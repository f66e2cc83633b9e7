"""Validation of data set rows; errors name the invalid rows.

A frame is checked in two steps: its columns by a pandera schema a kind of row (`frames.py`, whose
schemas of all stages' tables can be imported from here), then the contents of rows (`checks.py`):
roles, lengths, equal answers, trained tokens.
"""

import logging
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nemo_rl_core.config.data import RowPolicy
from nemo_rl_core.data import checks
from nemo_rl_core.data.frames import (
    ConversationSchema,
    EvalSchema,
    Faults,
    PairEvalSchema,
    PreferenceSchema,
    PromptSchema,
    ReferenceLogprobSchema,
    RolloutSchema,
    RowKind,
    RowSchema,
    Schema,
    SftSchema,
    TextSchema,
    TokenPairSchema,
    check_frame,
    describe_faults,
    numbers,
    records_of,
    row_kind,
    schema_faults,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

__all__ = [
    "COLUMNS",
    "ConversationSchema",
    "EvalSchema",
    "PairEvalSchema",
    "PreferenceSchema",
    "PromptSchema",
    "ReferenceLogprobSchema",
    "RolloutSchema",
    "RowKind",
    "RowSchema",
    "SftSchema",
    "TextSchema",
    "TokenPairSchema",
    "check_disjoint",
    "check_frame",
    "row_kind",
    "validate_rows",
]

logger = logging.getLogger(__name__)

COLUMNS = ("id", "prompt", "answer", "completion", "task", "metadata")
"""The columns of prompts, in the order in which they are stored."""

_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    "prompts": COLUMNS,
    "conversations": ("id", "messages", "mask", "task", "metadata"),
    "text": ("id", "text", "task", "metadata"),
    "preferences": ("id", "prompt", "chosen", "rejected", "task", "metadata"),
}
_OPTIONAL = ("margin", "max_tokens")

_SCHEMAS: dict[RowKind, Schema] = {
    "prompts": SftSchema,
    "conversations": ConversationSchema,
    "text": TextSchema,
    "preferences": PreferenceSchema,
}


def validate_rows(
    rows: Sequence[Row],
    *,
    tokenizer: Any | None,
    max_prompt_tokens: int | None,
    name: str,
    policy: RowPolicy | None = None,
) -> pd.DataFrame:
    """Checks rows of any kind and returns them as a frame.

    Args:
        rows: Mappings as `load_rows` returns them, all of one kind.
        tokenizer: The model's tokenizer, for lengths and masks. None skips those checks.
        max_prompt_tokens: The longest prompt allowed in rows to sample from, chat template
            included; None for any.
        name: Name of the data set in messages, such as `train`.
        policy: Longest row, handling of longer and duplicate rows, and which turns are trained on
            (a data config is one); None takes the defaults.

    Returns:
        The columns of the kind in a fixed order, the rows in their own; `margin` where it is given,
        and `max_tokens` where rows are cut at that length when they are tokenised.

    Raises:
        DataError: Names the rows (counted from 0) and the checks that they fail.
    """
    policy = policy or RowPolicy()
    if not rows:
        raise DataError(
            f"the {name} data set is empty",
            expected="at least one row",
            got="0 rows",
            fix="check the file, or raise num_train and num_validation",
        )
    if surrogate_faults := checks.surrogate_faults(rows):  # pandas cannot hold such text
        raise describe_faults(surrogate_faults, name)
    frame = _to_frame(rows, policy)
    faults = _schema_faults(frame)
    too_long, longer, twice = Faults(), Faults(), Faults()
    if tokenizer is not None and row_kind(frame.columns.tolist()) == "prompts":
        unknown, too_long = checks.prompt_faults(
            rows, tokenizer, max_prompt_tokens=max_prompt_tokens
        )
        faults |= unknown
    if not faults:
        # Rows that pass the schema have every column that these checks read.
        faults, twice = checks.meaning_faults(rows), checks.duplicate_faults(rows)
    if not faults and tokenizer is not None and _is_tokenised(frame, policy):
        faults, longer = checks.example_faults(records_of(frame), tokenizer, policy)
    # Prompts to sample from are never truncated: half a question has another answer.
    refused = too_long if policy.overlong != "drop" else Faults()
    refused |= longer if policy.overlong == "refuse" else Faults()
    refused |= twice if policy.duplicates == "refuse" else Faults()
    if faults or refused:
        repeated_alone = bool(refused) and not faults and refused == twice
        otherwise = "; data.duplicates: drop or keep allows repeated ones" if repeated_alone else ""
        raise describe_faults(faults | refused, name, otherwise=otherwise)
    dropped = (too_long | longer) if policy.overlong == "drop" else Faults()
    dropped |= twice if policy.duplicates == "drop" else Faults()
    limit = policy.max_sequence_tokens if policy.overlong == "truncate" and longer else None
    return _kept(frame, name, dropped=dropped, limit=limit, num_cut=_num_rows(longer))


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Raises if the validation set shares prompts with the training set.

    Raises:
        DataError: Names the first shared rows of the validation set, counted from 0.
    """
    trained = {checks.prompt_of(row) for row in train}
    shared = [index for index, row in enumerate(validation) if checks.prompt_of(row) in trained]
    if shared:
        example = checks.prompt_of(validation[shared[0]])
        raise DataError(
            f"{len(shared)} of {len(validation)} validation prompts are in the training data too, "
            "so accuracy would be measured on training data",
            expected="no prompt in both",
            got=f"validation rows {numbers(shared)}; the first is {example[:80]!r}",
            fix="remove these rows from one of the two",
        )


def _to_frame(rows: Sequence[Row], policy: RowPolicy) -> pd.DataFrame:
    # A column of only numbers or only nulls keeps its type, so that the schema can refuse it.
    frame = pd.DataFrame(list(rows))
    kind = row_kind(frame.columns.tolist())
    if kind == "conversations" and "mask" not in frame:
        frame["mask"] = policy.mask
    wanted = (*_COLUMNS[kind], *_OPTIONAL)
    return frame[[column for column in wanted if column in frame.columns]]


def _is_tokenised(frame: pd.DataFrame, policy: RowPolicy) -> bool:
    # Prompts for sampling alone have no completion whose length counts.
    prompts = row_kind(frame.columns.tolist()) == "prompts"
    return not prompts or policy.max_sequence_tokens is not None


def _kept(
    frame: pd.DataFrame, name: str, *, dropped: Faults, limit: int | None, num_cut: int
) -> pd.DataFrame:
    for fault_text, rows in dropped.items():
        logger.warning("the %s data set: %d rows dropped: %s", name, len(rows), fault_text)
    if limit is not None:
        logger.warning("the %s data set: %d rows cut at %d tokens", name, num_cut, limit)
        frame = frame.assign(max_tokens=limit)
    gone = {index for rows in dropped.values() for index in rows}
    left = frame[[index not in gone for index in range(len(frame))]]
    if left.empty:
        raise DataError(
            f"the {name} data set has no rows left",
            expected="at least one row",
            got=f"{len(frame)} rows, all dropped: {'; '.join(dropped)}",
            fix="raise the limits that its rows fail",
        )
    return left.reset_index(drop=True)


def _num_rows(faults: Faults) -> int:
    return len({index for rows in faults.values() for index in rows})


def _schema_faults(frame: pd.DataFrame) -> Faults:
    return schema_faults(_SCHEMAS[row_kind(frame.columns.tolist())], frame)
