"""Early refusal of prompts that are certainly too long, before tokenization.

A tokenizer takes minutes for some megabytes. A token stands for at most as many characters as its
own text has, so a text with more characters than `max_tokens` of the longest token has more than
`max_tokens` tokens.
"""

import json
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control_tokens import render_turns
from nemo_rl_core.data.turns import as_turns


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
