"""Checks of rows beyond column types: roles, lengths, duplicates and tokenization.

Every function returns a mapping from a fault to the indices of its rows, counted from 0.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.chat import prompt_token_ids, tokenize_row
from nemo_rl_core.data.chunks import rows_of
from nemo_rl_core.data.control import has_lone_surrogate
from nemo_rl_core.data.digests import repeats
from nemo_rl_core.data.frames import Faults
from nemo_rl_core.data.lengths import is_certainly_longer
from nemo_rl_core.data.turns import as_turns, fault, stored, turns_of
from nemo_rl_core.data.unknown import unknown_characters, unknown_token_id
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

Records = Sequence[Mapping[str, Any]]

_PLACEHOLDER_ANSWER = {"role": "assistant", "content": "..."}
"""Placeholder for the completion of a prompt."""


def prompt_of(row: Mapping[str, Any]) -> str:
    """Returns the prompt of a row: its prompt, a conversation up to its last turn, or its text."""
    if "messages" in row:
        turns = turns_of(row["messages"])
        return str(stored(turns[:-1]) if turns and len(turns) > 1 else row["messages"])
    return str(row["text"] if "text" in row else row["prompt"])


def prompts_of(chunk: "list[Row] | pa.Table") -> Sequence[str]:
    """The prompt of each row of a chunk, as `prompt_of` returns it."""
    if isinstance(chunk, list) or "messages" in chunk.column_names:
        return [prompt_of(row) for row in rows_of(chunk)]
    column = chunk.column("text" if "text" in chunk.column_names else "prompt")
    # Text of a null, as `str` writes it; a check of its column names the row.
    return cast(Sequence[str], column.fill_null("None").to_numpy(zero_copy_only=False))


def asked_by(chunk: "list[Row] | pa.Table") -> Sequence[str]:
    """What rows must not repeat: their prompt; of pairs, the answers too."""
    if not isinstance(chunk, list) and "chosen" not in chunk.column_names:
        return prompts_of(chunk)
    rows = rows_of(chunk)
    if not any("chosen" in row for row in rows):
        return [prompt_of(row) for row in rows]
    texts = ((prompt_of(row), str(row.get("chosen")), str(row.get("rejected"))) for row in rows)
    # The lengths say where each text ends.
    return [f"{len(a)} {len(b)} {a}{b}{c}" for a, b, c in texts]


def duplicate_faults(rows: Sequence[Row], columns: Collection[str]) -> Faults:
    """Rows with the prompt of an earlier row; of pairs, all three columns must be equal.

    Args:
        rows: Gone through twice where hashes are equal.
        columns: Of the rows.
    """
    found = repeats(rows, asked_by)
    names = {"chosen": "pair", "messages": "conversation up to its last turn", "text": "text"}
    name = next((label for column, label in names.items() if column in columns), "prompt")
    return {f"{name} occurs twice": found} if found else {}


def meaning_faults(rows: Records) -> Faults:
    """Rows with roles out of order, empty turns, or equal chosen and rejected answers."""
    found: Faults = {}
    for index, row in enumerate(rows):
        for fault_text in _row_faults(row):
            found.setdefault(fault_text, []).append(index)
    return found


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row:
        wrong = fault(turns_of(row["messages"]))
        return [f"messages {wrong}"] if wrong else []
    if "chosen" not in row:
        turns = turns_of(row.get("prompt"))
        wrong = fault([*turns, _PLACEHOLDER_ANSWER]) if turns else None
        return [f"prompt {wrong}"] if wrong else []
    found = [
        f"prompt with {side} {wrong}"
        for side in ("chosen", "rejected")
        if (wrong := _pair_fault(row["prompt"], row[side]))
    ]
    return [*found, "chosen equals rejected"] if row["chosen"] == row["rejected"] else found


def _pair_fault(prompt: Any, answer: Any) -> str | None:
    turns = as_turns(answer, role="assistant")
    return fault([*as_turns(prompt, role="user"), *turns])


def surrogate_faults(rows: Records) -> Faults:
    """Rows with an unpaired surrogate, which neither files nor tokenizers can encode."""
    found: Faults = {}
    for index, row in enumerate(rows):
        for column, value in row.items():
            if type(value) is str and value.isascii():
                continue  # most values, at the cost of a look at a flag
            if _has_lone_surrogate(value):
                found.setdefault(f"{column} holds half of a surrogate pair", []).append(index)
    return found


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return has_lone_surrogate(value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, [*value, *value.values()]))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def prompt_faults(
    rows: Records, tokenizer: Any, *, max_prompt_tokens: int | None
) -> tuple[Faults, Faults, dict[str, None], float]:
    """Prompts that the tokenizer cannot encode, and prompts that are too long.

    Returns:
        Both kinds of faults, the characters without a token, in their order, and the tokens of the
        longest prompt: infinity where it was too long to be counted.
    """
    characters: dict[str, None] = {}
    unknown_id = unknown_token_id(tokenizer)
    unknown: Faults = {}
    too_long: Faults = {}
    longest = 0.0
    for index, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or _row_faults(row):
            continue  # named by other checks
        fault_text = f"prompt has more than {max_prompt_tokens} tokens (max_prompt_tokens)"
        limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
        try:
            if is_certainly_longer(tokenizer, row["prompt"], limit):
                too_long.setdefault(fault_text, []).append(index)
                longest = math.inf
                continue
            ids = prompt_token_ids(tokenizer, row["prompt"], row="prompt")
        except DataError as error:
            unknown.setdefault(error.in_one_line, []).append(index)
            continue
        if unknown_id is not None and unknown_id in ids:
            unknown.setdefault("prompt has unknown characters", []).append(index)
            text = "".join(str(turn["content"]) for turn in as_turns(row["prompt"], role="user"))
            characters.update(dict.fromkeys(unknown_characters(tokenizer, text)))
        longest = max(longest, len(ids))
        if len(ids) > limit:
            too_long.setdefault(fault_text, []).append(index)
    return unknown, too_long, characters, longest


def example_faults(
    rows: Records,
    tokenizer: Any,
    policy: RowPolicy,
    *,
    first: int = 0,
    limit_name: str = "max_sequence_tokens",
) -> tuple[Faults, Faults]:
    """Rows without a token that is trained on, and rows that are too long.

    Args:
        rows: Valid ones.
        tokenizer: The model's.
        policy: The longest row, and what becomes of longer ones.
        first: The number of the first row, for the error.
        limit_name: What sets the longest row, for the fault.

    Raises:
        DataError: When the turns of a row cannot be separated by the chat template (names the row).
    """
    untrained: Faults = {}
    too_long: Faults = {}
    limit = policy.max_sequence_tokens
    for index, row in enumerate(rows):
        examples = _examples(tokenizer, row, first + index).values()
        if limit is not None and max(len(example.token_ids) for example in examples) > limit:
            fault_text = f"row has more than {limit} tokens ({limit_name})"
            too_long.setdefault(fault_text, []).append(index)
        kept = limit if policy.overlong == "truncate" else None
        if not all(example.truncated(kept).num_trained_tokens for example in examples):
            untrained.setdefault("row has no token that is trained on", []).append(index)
    return untrained, too_long


def _examples(tokenizer: Any, row: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return tokenize_row(tokenizer, row)
    except DataError as error:
        problem = f"row {index} (counted from 0): {error.problem}"
        raise DataError(problem, error.expected, error.got, error.fix) from error
