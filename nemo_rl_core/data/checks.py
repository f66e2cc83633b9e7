"""Checks of rows beyond column types: roles, lengths, duplicates and tokenization.

Rows are counted from 0.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.chat import prompt_token_ids, tokenize_row
from nemo_rl_core.data.chunks import Chunk, rows_of
from nemo_rl_core.data.control import has_lone_surrogate
from nemo_rl_core.data.digests import repeats
from nemo_rl_core.data.frames import Faults
from nemo_rl_core.data.lengths import is_certainly_longer
from nemo_rl_core.data.tools import tools_of
from nemo_rl_core.data.turns import FLAG, Turn, as_turns, fault, stored, turns_of
from nemo_rl_core.data.unknown import unknown_characters, unknown_token_id
from nemo_rl_core.data.written import unwritten_keys
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

Records = Sequence[Mapping[str, Any]]

_ANSWER = {"role": "assistant", "content": "..."}
"""Placeholder for the completion of a prompt."""


def prompt_of(row: Mapping[str, Any]) -> str:
    """Returns the prompt of a row: its prompt, a conversation up to its last turn, or its text."""
    if "messages" in row:
        turns = turns_of(row["messages"])
        return str(stored(turns[:-1]) if turns and len(turns) > 1 else row["messages"])
    return str(row["text"] if "text" in row else row["prompt"])


def prompts_of(chunk: Chunk) -> Sequence[str]:
    """Returns `prompt_of` each row of a chunk."""
    if isinstance(chunk, list) or "messages" in chunk.column_names:
        return [prompt_of(row) for row in rows_of(chunk)]
    column = chunk.column("text" if "text" in chunk.column_names else "prompt")
    # A null becomes `str(None)`; the check of its column reports the row.
    return cast(Sequence[str], column.fill_null("None").to_numpy(zero_copy_only=False))


def duplicate_keys(chunk: Chunk) -> Sequence[str]:
    """Returns the texts that may occur only once: the prompt with its tools and its pair."""
    others = ("chosen", "rejected", "tools")
    if not isinstance(chunk, list) and not {*others} & {*chunk.column_names}:
        return prompts_of(chunk)
    rows = rows_of(chunk)
    if not any(name in row for row in rows for name in others):
        return [prompt_of(row) for row in rows]
    texts = ((prompt_of(row), *(str(row.get(name) or "") for name in others)) for row in rows)
    # The lengths mark where each text ends.
    return [f"{[*map(len, parts)]} {''.join(parts)}" for parts in texts]


def duplicate_faults(rows: Sequence[Row], columns: Collection[str]) -> Faults:
    """Returns rows that repeat the prompt of an earlier row; for pairs, all three columns."""
    repeated = repeats(rows, duplicate_keys)
    names = {"chosen": "pair", "messages": "conversation up to its last turn", "text": "text"}
    name = next((label for column, label in names.items() if column in columns), "prompt")
    return {f"{name} occurs twice": repeated} if repeated else {}


def conversation_faults(rows: Records) -> Faults:
    """Returns rows with roles out of order, empty turns, or equal chosen and rejected answers."""
    faults: Faults = {}
    for index, row in enumerate(rows):
        for fault_text in _row_faults(row):
            faults.setdefault(fault_text, []).append(index)
    return faults


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row:
        turns = turns_of(row["messages"])
        roles = [turn.get("role") for turn in turns or ()]
        # Turns after the last answer are left out.
        is_open = "assistant" in roles and roles[-1] in ("user", "tool")
        wrong = fault([*(turns or ()), _ANSWER] if is_open else turns)
        if wrong and turns and turns[-1]["role"] != "assistant" and not fault([*turns, _ANSWER]):
            wrong += " (prompts to sample from: data.columns: {messages: prompt, COLUMN: answer})"
        return [f"messages {wrong}"] if wrong else []
    if "chosen" not in row:
        turns = turns_of(row.get("prompt"))
        wrong = _conversation_fault(turns, [_ANSWER]) if turns else None
        return [f"prompt {wrong}"] if wrong else []
    faults = [
        f"prompt with {side} {wrong}"
        for side in ("chosen", "rejected")
        if (wrong := _pair_fault(row["prompt"], row[side]))
    ]
    return [*faults, "chosen equals rejected"] if row["chosen"] == row["rejected"] else faults


def _pair_fault(prompt: Any, answer: Any) -> str | None:
    turns = as_turns(answer, role="assistant")
    if any(turn["role"] == "assistant" and turn.get(FLAG) is False for turn in turns):
        return "has a turn with train: false, and pairs train on complete answers"
    return _conversation_fault(as_turns(prompt, role="user"), turns)


def _conversation_fault(prompt: Sequence[Turn], answer: Sequence[Turn]) -> str | None:
    if prompt[-1]["role"] == answer[0]["role"] == "assistant":
        return "has role 'assistant' after 'assistant'"
    return fault([*prompt, *answer])


def unwritten(rows: Records, tokenizer: Any, seen: set[tuple[str, str]]) -> dict[str, int]:
    """Returns keys of turns that the chat template does not write, with their first row.

    Args:
        seen: Roles and keys of earlier rows; those of these rows are added.
    """
    first_rows: dict[str, int] = {}
    for index, row in enumerate(rows):
        for column in ("messages", "prompt", "chosen", "rejected"):
            turns = turns_of(row.get(column)) or []
            new = {(str(turn["role"]), key) for turn in turns for key in turn} - seen
            if new:
                seen |= new
                for name in unwritten_keys(tokenizer, turns):
                    first_rows.setdefault(name, index)
    return first_rows


def surrogate_faults(rows: Records) -> Faults:
    """Returns rows with an unpaired surrogate, which neither files nor tokenizers can encode."""
    faults: Faults = {}
    for index, row in enumerate(rows):
        for column, value in row.items():
            if type(value) is str and value.isascii():
                continue  # isascii only reads a flag, and most values are ASCII
            if _has_lone_surrogate(value):
                faults.setdefault(f"{column} holds half of a surrogate pair", []).append(index)
    return faults


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return has_lone_surrogate(value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, [*value, *value.values()]))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def prompt_faults(
    rows: Records, tokenizer: Any, *, max_prompt_tokens: int | None
) -> tuple[Faults, Faults, dict[str, None], float]:
    """Finds prompts that the tokenizer cannot encode, and prompts that are too long.

    Returns:
        Both kinds of faults; the characters without a token, in order of occurrence; and the number
        of tokens of the longest prompt, infinity if it was too long to count.
    """
    characters: dict[str, None] = {}
    unknown_id = unknown_token_id(tokenizer)
    unknown: Faults = {}
    too_long: Faults = {}
    longest = 0.0
    for index, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or _row_faults(row):
            continue  # reported by other checks
        fault_text = f"prompt has more than {max_prompt_tokens} tokens (max_prompt_tokens)"
        limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
        try:
            if is_certainly_longer(tokenizer, row["prompt"], limit):
                too_long.setdefault(fault_text, []).append(index)
                longest = math.inf
                continue
            ids = prompt_token_ids(tokenizer, row["prompt"], tools=tools_of(row), row="prompt")
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
) -> tuple[Faults, Faults, Faults]:
    """Finds rows without a trained token, rows that are too long, and pairs with equal tokens.

    Raises:
        DataError: When the chat template cannot separate the turns of a row (names the row),
            unless the policy drops such rows; the first faults then include them.
    """
    untrained: Faults = {}
    too_long: Faults = {}
    equal: Faults = {}
    unwritable = ""  # the first error's text for all rows, since every error quotes its row
    limit = policy.max_sequence_tokens
    for index, row in enumerate(rows):
        try:
            examples = [*_examples(tokenizer, row, first + index).values()]
        except DataError as error:
            if not policy.drops_invalid:
                raise
            unwritable = unwritable or f"{error.in_one_line} (fix: {error.fix})"
            untrained.setdefault(unwritable, []).append(index)
            continue
        if limit is not None and max(len(example.token_ids) for example in examples) > limit:
            fault_text = f"row has more than {limit} tokens ({limit_name})"
            too_long.setdefault(fault_text, []).append(index)
        cut_length = limit if policy.overlong == "truncate" else None
        if not all(example.truncated(cut_length).num_trained_tokens for example in examples):
            untrained.setdefault("row has no token that is trained on", []).append(index)
        elif len(examples) == 2 and examples[0].truncated(cut_length) == examples[1].truncated(
            cut_length
        ):
            cut = f" after cutting at {cut_length} tokens" if examples[0] != examples[1] else ""
            equal.setdefault(f"chosen and rejected have equal tokens{cut}", []).append(index)
    return untrained, too_long, equal


def _examples(tokenizer: Any, row: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return tokenize_row(tokenizer, row)
    except DataError as error:
        problem = f"row {index} (counted from 0): {error.problem}"
        raise DataError(problem, error.expected, error.got, error.fix) from error
