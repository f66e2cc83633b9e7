"""Token ids of an environment's turn after a turn of the policy.

The policy's tokens stay exactly as sampled: they are neither decoded nor encoded again. The tokens
after them are the difference of two renderings of a conversation with a placeholder for the
policy's turn: up to the placeholder, and with the reply. A template that starts a new assistant
turn differently from how it renders past ones (with `<think>`, for example) is refused: the model
would get conversations that it was not trained on.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control import Rendered, encode_conversation, encode_text
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.errors import DataError

_PLACEHOLDER = "0"
"""Placeholder turn that no template trims and no tokenizer merges with the next token."""


def reply_token_ids(
    tokenizer: Any, prompt: str, reply: Mapping[str, str], *, last_token: int | None
) -> list[int]:
    """Returns the tokens between the policy's turn and its next turn.

    Args:
        tokenizer: A transformers tokenizer. Without a chat template the reply's text is appended
            unchanged.
        reply: Mapping with `role` and `content`; the role `environment` is rendered as `user`.
        last_token: The policy's last token; an end-of-turn token is not repeated.

    Example:
        >>> from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
        >>> tokenizer, reply = build_arithmetic_tokenizer(), {"role": "user", "content": "7"}
        >>> tokenizer.decode(reply_token_ids(tokenizer, "1+2=", reply, last_token=5))
        '<eos>7'
        >>> tokenizer.decode(reply_token_ids(tokenizer, "1+2=", reply, last_token=2))
        '7'
    """
    row = f"the {reply['role']} turn that begins with {reply['content'][:80]!r}"
    if not tokenizer.chat_template:
        return encode_text(tokenizer, reply["content"], row=row, add_special_tokens=False)
    turns = as_turns(prompt, role="user")
    role = "user" if reply["role"] == "environment" else reply["role"]
    following = [
        {"role": "assistant", "content": _PLACEHOLDER},
        {"role": role, "content": reply["content"]},
    ]
    before, before_ids = _opening(tokenizer, tokenizer.get_chat_template(), prompt)
    text, ids = encode_conversation(
        tokenizer,
        [*turns, *following],
        row=row,
        what=f"a turn of {role!r} after the assistant's",
        add_generation_prompt=True,
    )
    if not text.startswith(before) or ids[: len(before_ids)] != before_ids:
        raise DataError(
            "the chat template writes the policy's turn differently when another turn follows",
            expected=f"text that begins with {before[-60:]!r}",
            got=repr(text[max(len(before) - 60, 0) : len(before) + 20]),
            fix="use a chat template that starts a new assistant turn like past ones",
        )
    new = ids[len(before_ids) :]
    return new[1:] if new[:1] == [last_token] else new


@lru_cache(maxsize=1024)  # about 80 MB for 2,000 tokens each; samples of a prompt share an entry
def _opening(tokenizer: Any, template: str, prompt: str) -> Rendered:
    """Renders the first turns and the placeholder; `template` is only a part of the cache key."""
    turns = as_turns(prompt, role="user")
    return encode_conversation(
        tokenizer,
        turns,
        row=f"the conversation that begins with {str(turns[0].get('content'))[:80]!r}",
        add_generation_prompt=True,
        ending=_PLACEHOLDER,
    )
