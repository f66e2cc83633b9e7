"""Validation of data set rows; errors name the invalid rows.

The columns of a frame are checked by the pandera schema of its kind (`frames.py`), then the
contents of its rows (`checks.py`): roles, lengths, equal answers, trained tokens.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_rl_core.config.row_policy import MAX_DROPPED, RowPolicy
from nemo_rl_core.data import checks
from nemo_rl_core.data.checking import RowChecking
from nemo_rl_core.data.chunks import select_rows
from nemo_rl_core.data.digests import rows_in
from nemo_rl_core.data.frames import Faults, describe_faults, invalid_fix, numbers, summarize_faults
from nemo_rl_core.data.tables import select_table
from nemo_rl_core.data.unknown import OTHER_MODELS, described_unknown
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


def checked_rows(
    rows: Sequence[Row],
    *,
    tokenizer: Any | None,
    max_prompt_tokens: int | None,
    name: str,
    source: str = "",
    policy: RowPolicy | None = None,
    context_length: int | None = None,
) -> pa.Table:
    """Checks rows of any kind, in chunks.

    Args:
        rows: Rows from `load_rows`, all of one kind.
        tokenizer: Tokenizer that measures lengths and masks; None skips those checks.
        max_prompt_tokens: Maximum length of a prompt to sample from, including the chat template;
            None for no limit.
        name: Name of the data set in messages, such as `train`.
        source: Origin of its rows for messages, such as a file.
        policy: Maximum row length, handling of longer and duplicate rows, and which turns are
            trained on (a data config is such a policy); None uses the defaults.
        context_length: Context of the model in tokens, which limits training rows; None for rows
            to sample from, or if it is unknown.

    Returns:
        The rows in order, with the columns of their kind in a fixed order, including `margin` if
        present, and `max_tokens` if rows will be truncated when they are tokenised.

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
    check = partial(
        RowChecking,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        policy=policy,
        limit_name=limit_name,
    )
    checking = check(rows)
    checked = checking.checked()
    while policy.drops_invalid and (kept := _without_faults(rows, checking, name)) is not None:
        rows, checking = kept, check(kept)
        checked = checking.checked()
    if checking.surrogates:  # pandas cannot store such text
        otherwise = invalid_fix("", drops=policy.drops_invalid)
        raise describe_faults(checking.surrogates, name, source=source, otherwise=otherwise)
    faults, too_long, longer = checking.faults, checking.too_long, checking.longer
    repeated = Faults() if policy.duplicates == "keep" else _repeated(rows, checking)
    # Prompts to sample from are never truncated, since that would change the question.
    refused = Faults() if policy.overlong == "drop" else too_long
    refused = refused | (longer if policy.overlong == "refuse" else Faults())
    refused = refused | (repeated if policy.duplicates == "refuse" else Faults())
    if faults or refused:
        raise _refusal(
            checking,
            refused,
            name,
            tokenizer,
            repeated=repeated,
            source=source,
            drops=policy.drops_invalid,
        )
    assert checked is not None, "rows without faults are kept"
    for key, row in checking.unwritten_keys.items():
        logger.warning(
            "the %s data set: the chat template does not write %s (first in row %d)", name, key, row
        )
    dropped = checking.equal_pairs
    dropped |= (too_long | longer) if policy.overlong == "drop" else Faults()
    dropped |= repeated if policy.duplicates == "drop" else Faults()
    limit = policy.max_sequence_tokens if policy.overlong == "truncate" and longer else None
    return _kept(
        checked,
        name,
        dropped=dropped,
        limit=limit,
        num_cut=len({row for rows in longer.values() for row in rows}),
    )


def _without_faults(rows: Sequence[Row], checking: RowChecking, name: str) -> Sequence[Row] | None:
    """Returns the rows without faults; None if none is faulty, or too many to drop."""
    faults = checking.surrogates or checking.faults
    faulty = {row for indices in faults.values() for row in indices}
    if not faulty or not all(faults.values()) or len(faulty) > MAX_DROPPED * len(rows):
        return None
    summary = summarize_faults(faults)
    logger.warning(
        "the %s data set: %d of %d rows dropped: %s", name, len(faulty), len(rows), summary
    )
    is_kept = np.ones(len(rows), dtype=bool)
    is_kept[[*faulty]] = False
    return select_rows(rows, is_kept)


def _refusal(
    checking: RowChecking,
    refused: Faults,
    name: str,
    tokenizer: Any,
    *,
    repeated: Faults,
    source: str,
    drops: bool,
) -> DataError:
    """Returns the error for rows with faults, and for rows that the policy refuses."""
    if refused and not checking.faults and refused == checking.too_long:
        # The limit comes first, since it is a setting, and all rows may be too long.
        longest = checking.longest_prompt
        target = f" to at least {longest:.0f}" if longest < math.inf else ""
        fix = f"raise data.max_prompt_tokens{target}, or drop these rows: data.overlong: drop"
        return describe_faults(refused, name, source=source, fix=fix)
    only_repeated = bool(refused) and not checking.faults and refused == repeated
    otherwise = "; data.duplicates: drop or keep allows repeated rows" if only_repeated else ""
    if checking.longer and not checking.faults and refused == checking.longer:
        otherwise = "; data.overlong: truncate or drop allows longer rows"
    characters = checking.unknown_characters
    if not refused and not characters and all(checking.faults.values()):
        otherwise = invalid_fix("", drops=drops)
    faults = checking.faults | refused
    error = describe_faults(faults, name, source=source, otherwise=otherwise)
    if not characters:
        return error
    got = described_unknown(tokenizer, characters)
    otherwise = "or " if len(faults) == 1 else "or, for the unknown characters, "
    return DataError(error.problem, got=got, fix=f"{error.fix}, {otherwise}{OTHER_MODELS}")


def _repeated(rows: Sequence[Row], checking: RowChecking) -> Faults:
    """Returns rows that repeat an earlier one; faulty rows are not compared."""
    if checking.has_readable_rows:
        return checks.duplicate_faults(rows, checking.columns)
    # Malformed conversations and pairs cannot be compared.
    key = "text" if "text" in checking.columns else "prompt"
    if {"messages", "chosen"} & {*checking.columns} or not all(key in row for row in rows):
        return Faults()
    faulty = {row for indices in checking.faults.values() for row in indices}
    repeated = checks.duplicate_faults(rows, checking.columns)
    faults = {text: [row for row in found if row not in faulty] for text, found in repeated.items()}
    return {text: indices for text, indices in faults.items() if indices}


def check_disjoint(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Raises if the validation set shares prompts with the training set.

    Raises:
        DataError: Names the first shared rows of the validation set, counted from 0.
    """
    shared = rows_in(validation, train, checks.prompts_of)
    if shared:
        example = checks.prompt_of(validation[shared[0]])
        raise DataError(
            f"{len(shared)} of {len(validation)} validation prompts are also in the training data, "
            "so accuracy would be measured on training data",
            expected="no prompt in both",
            got=f"validation rows {numbers(shared)}; the first is {example[:80]!r}",
            fix="remove these rows from one of the two",
        )


def _kept(
    checked: pa.Table, name: str, *, dropped: Faults, limit: int | None, num_cut: int
) -> pa.Table:
    for fault_text, rows in dropped.items():
        logger.warning("the %s data set: %d rows dropped: %s", name, len(rows), fault_text)
    if limit is not None:
        logger.warning("the %s data set: %d rows cut at %d tokens", name, num_cut, limit)
        checked = _with_limit(checked, limit)
    is_kept = np.ones(len(checked), dtype=bool)
    for rows in dropped.values():
        is_kept[np.array(rows, dtype=np.int64)] = False
    if not is_kept.any():
        raise DataError(
            f"the {name} data set has no rows left",
            expected="at least one row",
            got=f"{len(checked)} rows, all dropped: {'; '.join(dropped)}",
            fix="raise the limits that its rows fail",
        )
    return checked if is_kept.all() else select_table(checked, is_kept)


def _with_limit(table: pa.Table, max_tokens: int) -> pa.Table:
    limits = pa.repeat(pa.scalar(max_tokens, pa.int64()), len(table))
    if "max_tokens" not in table.column_names:
        return table.append_column("max_tokens", limits)
    return table.set_column(table.column_names.index("max_tokens"), "max_tokens", limits)
