"""Refusal of rows beyond the model's context, and early of prompts that are certainly too long.

A tokenizer takes minutes for some megabytes. A token stands for at most as many characters as its
own text has, so a text with more characters than `max_tokens` of the longest token has more than
`max_tokens` tokens.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control_tokens import render_turns
from nemo_rl_core.data.frame_faults import numbers
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.errors import ConfigError, DataError


def refuse_longer(lengths: Iterable[int], limit: int | None, *, name: str) -> None:
    """Refuses rows to train on that are longer than the model's context.

    Args:
        lengths: Tokens of each row; of a pair, those of its longer sequence.
        limit: The most tokens of a row; None for any.
        name: Name of the data set in the message, such as `train`.

    Raises:
        DataError: Gives the number of longer rows, and names the first ones.
    """
    if limit is None:
        return
    longer = {row: length for row, length in enumerate(lengths) if length > limit}
    if longer:
        raise DataError(
            f"{len(longer)} rows of the {name} data set are longer than the model's context",
            expected=f"at most {limit} tokens in a row",
            got=f"rows {numbers(list(longer))}, counted from 0, with up to {max(longer.values())} "
            "tokens",
            fix="cut these rows or leave them out: data.overlong: truncate or drop in a recipe, "
            f"policy=RowPolicy(max_sequence_tokens={limit}, overlong='truncate') of DataModule.of "
            "in Python",
        )


def refuse_long_rollouts(
    prompt: int, completion: int, *, settings: str, limit: int | None, context: int | None
) -> None:
    """Refuses prompts and completions that may be too long.

    Args:
        prompt: The longest prompt, in tokens.
        completion: The longest completion.
        settings: Their settings, as the user writes them.
        limit: The model's `sampling_length`.
        context: The model's `context_length`.

    Raises:
        ConfigError: Names the settings and the limit.
    """
    if limit is None or prompt + completion <= limit:
        return
    problem = "prompts and completions may be longer than the model's context"
    fix = "lower one of the two, or take a model with a longer context"
    if context is None or limit < context:
        problem = (
            "the model's rotary embeddings change with the length of a sequence, so that it would "
            "be trained with other values than it samples with"
        )
        fix = (
            "lower one of the two, or stop the change in config.json: with rope_type longrope, "
            "give short_factor the values of long_factor"
        )
    raise ConfigError(
        problem,
        expected=f"{settings} <= {limit}",
        got=f"{prompt} + {completion}",
        fix=fix,
    )


def is_certainly_longer(tokenizer: Any, prompt: str, max_tokens: float) -> bool:
    """Returns True if a prompt has more than `max_tokens` tokens for certain.

    There are no false positives: white space and characters that the normalizer drops are not
    counted, and the result is False for tokenizers that may drop or join other characters.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: The user's text, or the JSON of a conversation.
        max_tokens: The limit, chat template included; infinity for none.

    Raises:
        DataError: If the chat template fails.
    """
    if len(prompt) <= max_tokens:  # A token of a single character is the shortest.
        return False
    longest = _longest_token(tokenizer)
    if longest is None or len(prompt) <= max_tokens * longest:
        return False
    turns = as_turns(prompt, role="user")
    if tokenizer.chat_template:
        text = render_turns(tokenizer, turns, what="the prompt", add_generation_prompt=True)
    else:
        text = "".join(str(turn.get("content")) for turn in turns)
    text = "".join(text.split())
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is not None:
        text = normalizer.normalize_str(text)
    return len(text) > max_tokens * longest


@lru_cache(maxsize=8)
def _longest_token(tokenizer: Any) -> int | None:
    """The characters of the longest token; None if a token may stand for more than its text."""
    if not tokenizer.is_fast:
        return None
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    # Prompts with the unknown token are refused, unless its id is another special token too.
    doubles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    has_unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in doubles
    is_refused = has_unknown and (model.get("unk_token") or model.get("unk_id")) is not None
    splits = json.dumps([described["pre_tokenizer"], described["normalizer"]])
    covers_bytes = '"ByteLevel"' in splits or bool(model.get("byte_fallback"))
    drops = '"Removed"' in splits or '"CharDelimiterSplit"' in splits
    if drops or not (is_refused or covers_bytes):
        return None
    return max(map(len, tokenizer.get_vocab()))
