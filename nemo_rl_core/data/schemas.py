"""What a row must hold, and messages that name the rows that do not.

A frame is checked in two steps: its columns by a pandera schema a kind of row, then what a row
means (`checks.py`): roles, lengths, equal answers, what is left to train on.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors
from pandera.typing import Series

from nemo_rl_core.config.data import RowPolicy
from nemo_rl_core.data import checks
from nemo_rl_core.data.checks import Faults
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)

RowKind = Literal["prompts", "conversations", "text", "preferences"]
"""What a row is; `row_kind` tells it from the columns."""

COLUMNS = ("id", "prompt", "answer", "completion", "task", "metadata")
"""The columns of prompts, in the order in which they are stored."""

_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    "prompts": COLUMNS,
    "conversations": ("id", "messages", "mask", "task", "metadata"),
    "text": ("id", "text", "task", "metadata"),
    "preferences": ("id", "prompt", "chosen", "rejected", "task", "metadata"),
}
_OPTIONAL = ("margin", "max_tokens")

_NUM_NAMED_ROWS = 5
_NUM_NAMED_CHECKS = 6


def _is_json_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def _has_text(column: "Series[str]") -> "pd.Series[bool]":
    # What is no text at all fails the check of its type, with its row, and not this one.
    return column.map(lambda value: not isinstance(value, str) or bool(value.strip()))


class RowSchema(pa.DataFrameModel):
    """What every row has.

    Its checks bear no names, as pandera 0.35 gives those to the first subclass alone; `_WORDS` says
    what their methods' names mean.
    """

    id: Series[str]
    task: Series[str]
    metadata: Series[str]

    @pa.check("id")
    def _unique(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805 (pandera binds the class)
        return ~column.duplicated()

    @pa.check("metadata")
    def _json(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return column.map(_is_json_object)


class PromptSchema(RowSchema):
    """A row that can be sampled from and scored."""

    prompt: Series[str]
    answer: Series[str]
    completion: Series[str]

    @pa.check("prompt", "answer")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


class SftSchema(PromptSchema):
    """A row that can also be trained on with supervision."""

    @pa.check("completion")
    def _completion_not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


class ConversationSchema(RowSchema):
    """A conversation to train on: `messages` is the JSON of its turns."""

    messages: Series[str]
    mask: Series[str] = pa.Field(isin=("all_assistant_turns", "final_turn"))


class TextSchema(RowSchema):
    """A text to train on whole."""

    text: Series[str]

    @pa.check("text")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


class PreferenceSchema(RowSchema):
    """Two answers to one prompt, each a text or the JSON of turns.

    `margin`, where given, is by how much the chosen answer is better, in the units of the scores
    of a reward model.
    """

    prompt: Series[str]
    chosen: Series[str]
    rejected: Series[str]
    margin: Series[float] | None = pa.Field(coerce=True, ge=0, lt=float("inf"))

    @pa.check("prompt", "chosen", "rejected")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


_SCHEMAS: dict[RowKind, type[RowSchema]] = {
    "prompts": SftSchema,
    "conversations": ConversationSchema,
    "text": TextSchema,
    "preferences": PreferenceSchema,
}


def row_kind(columns: Mapping[str, Any] | Sequence[str]) -> RowKind:
    """What rows with these columns are; prompts, where nothing else fits.

    Example:
        >>> row_kind(["id", "prompt", "chosen", "rejected"])
        'preferences'
    """
    if "chosen" in columns:
        return "preferences"
    if "messages" in columns:
        return "conversations"
    return "text" if "text" in columns else "prompts"


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
        rows: Mappings as `load_rows` gives them, all of one kind.
        tokenizer: The model's tokenizer: lengths are counted, and masks made, as the model will see
            them. None leaves those checks out.
        max_prompt_tokens: The longest prompt allowed in rows to sample from, chat template
            included; None for any.
        name: What to call the data set in a message, such as `train`.
        policy: Longest row, what becomes of longer and of repeated ones, and which turns are
            trained on (a data config is one); None takes the defaults.

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
    frame = _framed(rows, policy)
    records = _records(frame)
    faults = _schema_faults(frame)
    too_long, longer, twice = Faults(), Faults(), Faults()
    if tokenizer is not None and row_kind(frame.columns.tolist()) == "prompts":
        unknown, too_long = checks.prompt_faults(
            records, tokenizer, max_prompt_tokens=max_prompt_tokens
        )
        faults |= unknown
    if not faults:
        faults, twice = checks.meaning_faults(records), checks.repeated(records)
    if not faults and tokenizer is not None and _is_tokenised(frame, policy):
        faults, longer = checks.example_faults(records, tokenizer, policy)
    # Half a question has another answer: a prompt to sample from is never cut.
    refused = too_long if policy.overlong != "drop" else Faults()
    refused |= longer if policy.overlong == "refuse" else Faults()
    refused |= twice if policy.duplicates == "refuse" else Faults()
    if faults or refused:
        raise _describe(faults | refused, name)
    dropped = (too_long | longer) if policy.overlong == "drop" else Faults()
    dropped |= twice if policy.duplicates == "drop" else Faults()
    limit = policy.max_sequence_tokens if policy.overlong == "truncate" and longer else None
    return _kept(frame, name, dropped=dropped, limit=limit, num_cut=_num_rows(longer))


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Refuses a validation set that asks what the training set asks.

    Raises:
        DataError: Names the first shared rows of the validation set, counted from 0.
    """
    trained = {checks.asked(row) for row in train}
    shared = [place for place, row in enumerate(validation) if checks.asked(row) in trained]
    if shared:
        example = checks.asked(validation[shared[0]])
        raise DataError(
            f"{len(shared)} of {len(validation)} validation prompts are in the training data too, "
            "so accuracy would be measured on what was trained on",
            expected="no prompt in both",
            got=f"validation rows {_numbers(shared)}; the first is {example[:80]!r}",
            fix="remove these rows from one of the two",
        )


def _framed(rows: Sequence[Row], policy: RowPolicy) -> pd.DataFrame:
    # A column of only numbers or only nulls keeps its type, so that the schema can refuse it.
    frame = pd.DataFrame(list(rows))
    kind = row_kind(frame.columns.tolist())
    if kind == "conversations" and "mask" not in frame:
        frame["mask"] = policy.mask
    wanted = (*_COLUMNS[kind], *_OPTIONAL)
    return frame[[column for column in wanted if column in frame.columns]]


def _records(frame: pd.DataFrame) -> list[Row]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _is_tokenised(frame: pd.DataFrame, policy: RowPolicy) -> bool:
    # Prompts may be for sampling alone, where no completion follows and none need fit.
    prompts = row_kind(frame.columns.tolist()) == "prompts"
    return not prompts or policy.max_sequence_tokens is not None


def _kept(
    frame: pd.DataFrame, name: str, *, dropped: Faults, limit: int | None, num_cut: int
) -> pd.DataFrame:
    for said, rows in dropped.items():
        logger.warning("the %s data set: %d rows dropped: %s", name, len(rows), said)
    if limit is not None:
        logger.warning("the %s data set: %d rows cut at %d tokens", name, num_cut, limit)
        frame = frame.assign(max_tokens=limit)
    gone = {place for rows in dropped.values() for place in rows}
    left = frame[[place not in gone for place in range(len(frame))]]
    if left.empty:
        raise DataError(
            f"the {name} data set has no rows left",
            expected="at least one row",
            got=f"{len(frame)} rows, all dropped: {'; '.join(dropped)}",
            fix="raise the limits that its rows fail",
        )
    return left.reset_index(drop=True)


def _num_rows(faults: Faults) -> int:
    return len({place for rows in faults.values() for place in rows})


_WORDS = {
    "column_in_dataframe": "is missing from every row",
    "not_nullable": "is missing or null",
    "_unique": "occurs twice",
    "_not_empty": "is empty",
    "_completion_not_empty": "is empty",
    "_json": "is not a JSON object",
}


def _schema_faults(frame: pd.DataFrame) -> Faults:
    schema = _SCHEMAS[row_kind(frame.columns.tolist())]
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        return _faults_of(error)
    return {}


def _faults_of(error: SchemaErrors) -> Faults:
    cases = error.failure_cases
    found: Faults = {}
    for column, check, case, index in zip(
        cases["column"], cases["check"], cases["failure_case"], cases["index"], strict=True
    ):
        subject = case if check == "column_in_dataframe" else column
        said = "is not text" if str(check).startswith("dtype") else _WORDS.get(check, str(check))
        rows = found.setdefault(f"{subject} {said}", [])
        if pd.notna(index) and int(index) not in rows:
            rows.append(int(index))
    return found


def _describe(failures: Faults, name: str) -> DataError:
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
