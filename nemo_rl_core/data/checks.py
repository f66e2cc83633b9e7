"""What rows mean, and what their tokens are: faults that a table's types do not show.

Every function returns what is wrong by the rows that it is wrong with, counted from 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.config.data import RowPolicy
from nemo_rl_core.data.chat import examples_of, prompt_token_ids
from nemo_rl_core.data.control import has_lone_surrogate
from nemo_rl_core.data.frames import Faults
from nemo_rl_core.data.lengths import is_certainly_longer
from nemo_rl_core.data.turns import as_turns, fault, stored, turns_of
from nemo_rl_core.errors import DataError

Records = Sequence[Mapping[str, Any]]

_ANSWER = {"role": "assistant", "content": "..."}
"""Stands for the completion that a prompt is sampled for."""


def asked(row: Mapping[str, Any]) -> str:
    """What a row asks: its prompt, a conversation up to its last turn, or the whole of a text."""
    if "messages" in row:
        turns = turns_of(row["messages"])
        return str(stored(turns[:-1]) if turns and len(turns) > 1 else row["messages"])
    return str(row["text"] if "text" in row else row["prompt"])


def repeated(rows: Records) -> Faults:
    """Rows that ask the same as an earlier one; several pairs may share a prompt, not all three."""
    seen: set[str] = set()
    found = []
    for place, row in enumerate(rows):
        key = "\n".join((asked(row), str(row.get("chosen")), str(row.get("rejected"))))
        if key in seen:
            found.append(place)
        seen.add(key)
    names = {"chosen": "pair", "messages": "conversation up to its last turn", "text": "text"}
    name = next((word for column, word in names.items() if rows and column in rows[0]), "prompt")
    return {f"{name} occurs twice": found} if found else {}


def meaning_faults(rows: Records) -> Faults:
    """Roles out of order, empty turns, and answers that cannot be told apart."""
    found: Faults = {}
    for place, row in enumerate(rows):
        for said in _row_faults(row):
            found.setdefault(said, []).append(place)
    return found


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row:
        wrong = fault(turns_of(row["messages"]))
        return [f"messages {wrong}"] if wrong else []
    if "chosen" not in row:
        turns = turns_of(row.get("prompt"))
        wrong = fault([*turns, _ANSWER]) if turns else None
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


def unwritable(rows: Records) -> Faults:
    """Texts that hold half of a surrogate pair, which neither a file nor a tokenizer can write."""
    found: Faults = {}
    for place, row in enumerate(rows):
        for column, value in row.items():
            if _has_lone_surrogate(value):
                found.setdefault(f"{column} holds half of a surrogate pair", []).append(place)
    return found


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return has_lone_surrogate(value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, [*value, *value.values()]))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def prompt_faults(
    rows: Records, tokenizer: Any, *, max_prompt_tokens: int | None
) -> tuple[Faults, Faults]:
    """Prompts to sample from that the tokenizer cannot write, and those that are too long."""
    unknown: Faults = {}
    too_long: Faults = {}
    for place, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or _row_faults(row):
            continue  # named by other checks
        said = f"prompt has more than {max_prompt_tokens} tokens (max_prompt_tokens)"
        limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
        try:
            if is_certainly_longer(tokenizer, row["prompt"], limit):
                too_long.setdefault(said, []).append(place)
                continue
            ids = prompt_token_ids(tokenizer, row["prompt"], row="prompt")
        except DataError as error:
            unknown.setdefault(error.in_one_line, []).append(place)
            continue
        if _num_unknown(tokenizer, ids):
            unknown.setdefault("prompt has unknown characters", []).append(place)
        if len(ids) > limit:
            too_long.setdefault(said, []).append(place)
    return unknown, too_long


def example_faults(rows: Records, tokenizer: Any, policy: RowPolicy) -> tuple[Faults, Faults]:
    """Rows without a token that is trained on, and rows that are too long.

    Raises:
        DataError: When the chat template does not tell the turns of a row apart (names the row).
    """
    untrained: Faults = {}
    too_long: Faults = {}
    limit = policy.max_sequence_tokens
    for place, row in enumerate(rows):
        examples = _examples(tokenizer, row, place).values()
        if limit is not None and max(len(example.token_ids) for example in examples) > limit:
            said = f"row has more than {limit} tokens (max_sequence_tokens)"
            too_long.setdefault(said, []).append(place)
        kept = limit if policy.overlong == "truncate" else None
        if not all(example.truncated(kept).num_trained_tokens for example in examples):
            untrained.setdefault("row has no token that is trained on", []).append(place)
    return untrained, too_long


def _examples(tokenizer: Any, row: Mapping[str, Any], place: int) -> dict[str, Any]:
    try:
        return examples_of(tokenizer, row)
    except DataError as error:
        problem = f"row {place} (counted from 0): {error.problem}"
        raise DataError(problem, error.expected, error.got, error.fix) from error


def _num_unknown(tokenizer: Any, ids: list[int]) -> int:
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    # Some tokenizers share one id between "unknown" and, say, end-of-text: it then says nothing.
    unknown = tokenizer.unk_token_id
    return 0 if unknown is None or unknown in special else ids.count(unknown)
