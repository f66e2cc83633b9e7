"""Refuses rows beyond the model's context, and very long prompts without tokenizing them.

Tokenizers need minutes for some megabytes. No token covers more characters than the longest token
of the vocabulary, so a text with more than `max_tokens` times as many characters has more than
`max_tokens` tokens.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control_tokens import render_turns
from nemo_rl_core.data.frames import numbers
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.data.unknown import unknown_token_id
from nemo_rl_core.errors import ConfigError, DataError


def refuse_longer(lengths: Iterable[int], limit: int | None, *, name: str) -> None:
    """Refuses rows to train on that are longer than the model's context.

    Args:
        lengths: Tokens of each row; for a pair, of its longer sequence.
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
            fix="truncate or drop these rows: data.overlong: truncate or drop in a recipe, "
            f"policy=RowPolicy(max_sequence_tokens={limit}, overlong='truncate') of DataModule.of "
            "in Python",
        )


def refuse_long_rollouts(
    prompt: int, completion: int, *, settings: str, limit: int | None, context: int | None
) -> None:
    """Refuses prompts and completions that may be too long.

    Args:
        prompt: Maximum tokens of a prompt.
        completion: Maximum tokens of a completion.
        settings: Settings of both limits, as the user writes them.
    """
    if limit is None or prompt + completion <= limit:
        return
    problem = "prompts and completions may be longer than the model's context"
    fix = "lower one of the two, or use a model with a longer context"
    if context is None or limit < context:
        problem = (
            "the model's rotary embeddings change with the length of a sequence, so training would "
            "use other values than sampling"
        )
        fix = (
            "lower one of the two, or make them constant in config.json: with rope_type longrope, "
            "set short_factor to the values of long_factor"
        )
    raise ConfigError(
        problem, expected=f"{settings} <= {limit}", got=f"{prompt} + {completion}", fix=fix
    )


def is_certainly_longer(tokenizer: Any, prompt: str, max_tokens: float) -> bool:
    """Whether a prompt certainly has more than `max_tokens` tokens.

    There are no false positives: white space and characters that the normalizer drops are not
    counted, and the result is False for tokenizers that may drop or join other characters.

    Args:
        max_tokens: Limit that includes the chat template; infinity for none.
    """
    if len(prompt) <= max_tokens:  # each token has at least one character
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
    """Returns the length of the longest token; None if tokens may cover more than their text."""
    if not tokenizer.is_fast:
        return None
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    # Prompts with the unknown token are refused, unless another special token has the same id.
    has_unknown = unknown_token_id(tokenizer) is not None
    is_refused = has_unknown and (model.get("unk_token") or model.get("unk_id")) is not None
    text_processing = json.dumps([described["pre_tokenizer"], described["normalizer"]])
    covers_bytes = '"ByteLevel"' in text_processing or bool(model.get("byte_fallback"))
    drops = '"Removed"' in text_processing or '"CharDelimiterSplit"' in text_processing
    if drops or not (is_refused or covers_bytes):
        return None
    return max(map(len, tokenizer.get_vocab()))
