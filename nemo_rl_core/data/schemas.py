"""Validation of data set rows; errors name the invalid rows.

A frame is checked in two steps: its columns by a pandera schema a kind of row (`frames.py`, whose
schemas of all stages' tables can be imported from here), then the contents of rows (`checks.py`):
roles, lengths, equal answers, trained tokens. `checking.py` goes through the rows.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data import checks
from nemo_rl_core.data.checking import COLUMNS, RowChecking
from nemo_rl_core.data.digests import rows_in
from nemo_rl_core.data.frame_faults import check_frame, describe_faults, numbers
from nemo_rl_core.data.frames import (
    ConversationSchema,
    Faults,
    PreferenceSchema,
    PromptSchema,
    RowKind,
    RowSchema,
    SftSchema,
    TextSchema,
    row_kind,
)
from nemo_rl_core.data.record_frames import (
    EvalSchema,
    PairEvalSchema,
    ReferenceLogprobSchema,
    RolloutSchema,
    TokenPairSchema,
)
from nemo_rl_core.data.tables import CheckedRows
from nemo_rl_core.data.unknown import OTHER_MODELS, described_unknown
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
    "checked_rows",
    "row_kind",
    "validate_rows",
]

logger = logging.getLogger(__name__)


def validate_rows(
    rows: Sequence[Row],
    *,
    tokenizer: Any | None,
    max_prompt_tokens: int | None,
    name: str,
    source: str = "",
    policy: RowPolicy | None = None,
) -> pd.DataFrame:
    """Checks rows of any kind and returns them as a frame; see `checked_rows`."""
    found = checked_rows(
        rows,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        name=name,
        source=source,
        policy=policy,
    )
    return found.frame()


def checked_rows(
    rows: Sequence[Row],
    *,
    tokenizer: Any | None,
    max_prompt_tokens: int | None,
    name: str,
    source: str = "",
    policy: RowPolicy | None = None,
    context_length: int | None = None,
) -> CheckedRows:
    """Checks rows of any kind, a chunk at a time.

    Args:
        rows: Mappings as `load_rows` returns them, all of one kind.
        tokenizer: The model's tokenizer, for lengths and masks. None skips those checks.
        max_prompt_tokens: The longest prompt allowed in rows to sample from, chat template
            included; None for any.
        name: Name of the data set in messages, such as `train`.
        source: Where its rows are from, for messages, such as a file.
        policy: Longest row, handling of longer and duplicate rows, and which turns are trained on
            (a data config is one); None takes the defaults.
        context_length: The model's context in tokens, which limits rows that are trained on as
            they are; None for rows to sample from, or if it is not known.

    Returns:
        The columns of the kind in a fixed order, the rows in their own; `margin` where it is given,
        and `max_tokens` where rows are cut at that length when they are tokenised.

    Raises:
        DataError: Names the rows (counted from 0) and the checks that they fail.
    """
    policy = policy or RowPolicy()
    if not len(rows):
        raise DataError(
            f"the {name} data set is empty",
            expected="at least one row",
            got="0 rows",
            fix=f"check {source or 'the file'}, or raise num_train and num_validation",
        )
    limit_name = "max_sequence_tokens"
    if context_length is not None and context_length < (policy.max_sequence_tokens or math.inf):
        policy = policy.model_copy(update={"max_sequence_tokens": context_length})
        limit_name = "the model's context"
    checking = RowChecking(
        rows,
        tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        policy=policy,
        limit_name=limit_name,
    )
    found = checking.checked()
    if checking.surrogates:  # pandas cannot hold such text
        raise describe_faults(checking.surrogates, name, source=source)
    faults, too_long, longer = checking.faults, checking.too_long, checking.longer
    twice = Faults() if policy.duplicates == "keep" else _repeated(rows, checking)
    # Prompts to sample from are never truncated: half a question has another answer.
    refused = Faults() if policy.overlong == "drop" else too_long
    refused = refused | (longer if policy.overlong == "refuse" else Faults())
    refused = refused | (twice if policy.duplicates == "refuse" else Faults())
    if faults or refused:
        raise _refusal(checking, refused, name, tokenizer, repeated=twice, source=source)
    assert found is not None, "rows without faults are kept"
    dropped = (too_long | longer) if policy.overlong == "drop" else Faults()
    dropped |= twice if policy.duplicates == "drop" else Faults()
    limit = policy.max_sequence_tokens if policy.overlong == "truncate" and longer else None
    return _kept(found, name, dropped=dropped, limit=limit, num_cut=_num_rows(longer))


def _refusal(
    checking: RowChecking,
    refused: Faults,
    name: str,
    tokenizer: Any,
    *,
    repeated: Faults,
    source: str,
) -> DataError:
    """The error for rows with faults, and for those that the policy refuses."""
    if refused and not checking.faults and refused == checking.too_long:
        # The limit comes first: it is a setting, and the rows may be all that there are.
        longest = checking.longest_prompt
        enough = f" to at least {longest:.0f}" if longest < math.inf else ""
        fix = f"raise data.max_prompt_tokens{enough}, or leave these rows out: data.overlong: drop"
        return describe_faults(refused, name, source=source, fix=fix)
    repeated_alone = bool(refused) and not checking.faults and refused == repeated
    otherwise = "; data.duplicates: drop or keep allows repeated ones" if repeated_alone else ""
    if checking.longer and not checking.faults and refused == checking.longer:
        otherwise = "; data.overlong: truncate or drop cuts longer rows or leaves them out"
    found = checking.faults | refused
    error = describe_faults(found, name, source=source, otherwise=otherwise)
    if not (characters := checking.unknown_characters):
        return error
    got = described_unknown(tokenizer, characters)
    instead = "or " if len(found) == 1 else "for the unknown characters it is enough to "
    return DataError(error.problem, got=got, fix=f"{error.fix}, {instead}{OTHER_MODELS}")


def _repeated(rows: Sequence[Row], checking: RowChecking) -> Faults:
    """Rows that repeat an earlier one; where others have faults, among rows without any."""
    if checking.has_readable_rows:
        return checks.duplicate_faults(rows, checking.columns)
    # Malformed conversations and pairs cannot be compared.
    key = "text" if "text" in checking.columns else "prompt"
    if {"messages", "chosen"} & {*checking.columns} or not all(key in row for row in rows):
        return Faults()
    faulty = {row for found in checking.faults.values() for row in found}
    repeated = checks.duplicate_faults(rows, checking.columns)
    left = {text: [row for row in found if row not in faulty] for text, found in repeated.items()}
    return {text: found for text, found in left.items() if found}


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Raises if the validation set shares prompts with the training set.

    Raises:
        DataError: Names the first shared rows of the validation set, counted from 0.
    """
    shared = rows_in(validation, train, checks.prompts_of)
    if shared:
        example = checks.prompt_of(validation[shared[0]])
        raise DataError(
            f"{len(shared)} of {len(validation)} validation prompts are in the training data too, "
            "so accuracy would be measured on training data",
            expected="no prompt in both",
            got=f"validation rows {numbers(shared)}; the first is {example[:80]!r}",
            fix="remove these rows from one of the two",
        )


def _kept(
    found: CheckedRows, name: str, *, dropped: Faults, limit: int | None, num_cut: int
) -> CheckedRows:
    for fault_text, rows in dropped.items():
        logger.warning("the %s data set: %d rows dropped: %s", name, len(rows), fault_text)
    if limit is not None:
        logger.warning("the %s data set: %d rows cut at %d tokens", name, num_cut, limit)
        found = found.with_limit(limit)
    is_kept = np.ones(len(found), dtype=bool)
    for rows in dropped.values():
        is_kept[np.array(rows, dtype=np.int64)] = False
    if not is_kept.any():
        raise DataError(
            f"the {name} data set has no rows left",
            expected="at least one row",
            got=f"{len(found)} rows, all dropped: {'; '.join(dropped)}",
            fix="raise the limits that its rows fail",
        )
    return found if is_kept.all() else found.taken(is_kept)


def _num_rows(faults: Faults) -> int:
    return len({index for rows in faults.values() for index in rows})
