"""Token ids of an environment's turn after a turn of the policy.

The policy's tokens stay as sampled: they are neither decoded nor encoded again. The tokens after
them are found by rendering a conversation with a placeholder for the policy's turn, once up to the
placeholder and once with the reply, and taking the difference. A template that opens the
assistant's turn differently from how it renders past turns (with `<think>`, for example) is
refused: the model would get conversations that it was not trained on.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control import Rendered, encode_conversation, encode_text
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.errors import DataError

_PLACEHOLDER = "0"
"""Placeholder turn that no template trims and no tokenizer merges with the next token."""

_ROLES = {"environment": "user"}
"""Names of roles in chat templates, if they differ."""


def reply_token_ids(
    tokenizer: Any, prompt: str, reply: Mapping[str, str], *, last_token: int | None
) -> list[int]:
    """Returns the tokens between the policy's turn and its next turn.

    Args:
        tokenizer: A transformers tokenizer. Without a chat template the reply's text is appended as
            it is.
        prompt: The text of the first turn, or the JSON of the first turns.
        reply: `role` and `content`; the role `environment` is rendered as `user`.
        last_token: The policy's last token; an end-of-turn token is not repeated.

    Raises:
        DataError: If the template cannot render such a turn, or renders earlier turns differently
            once it follows; or if the reply spells a control token that cannot be encoded as text.

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
    role = _ROLES.get(reply["role"], reply["role"])
    behind = [
        {"role": "assistant", "content": _PLACEHOLDER},
        {"role": role, "content": reply["content"]},
    ]
    before, before_ids = _opening(tokenizer, tokenizer.get_chat_template(), prompt)
    whole, whole_ids = encode_conversation(
        tokenizer,
        [*turns, *behind],
        row=row,
        what=f"a turn of {role!r} behind the assistant's",
        add_generation_prompt=True,
    )
    if not whole.startswith(before) or whole_ids[: len(before_ids)] != before_ids:
        raise DataError(
            "the chat template writes the policy's turn differently once another turn follows",
            expected=f"text that begins with {before[-60:]!r}",
            got=repr(whole[max(len(before) - 60, 0) : len(before) + 20]),
            fix="take a chat template that opens the assistant's turn as it writes it down later",
        )
    new = whole_ids[len(before_ids) :]
    return new[1:] if new[:1] == [last_token] else new


@lru_cache(maxsize=1024)  # of 2,000 tokens each about 80 MB; samples and turns begin alike
def _opening(tokenizer: Any, template: str, prompt: str) -> Rendered:
    """The first turns and the placeholder, under a template that may have been replaced."""
    turns = as_turns(prompt, role="user")
    return encode_conversation(
        tokenizer,
        turns,
        row=f"the conversation that begins with {str(turns[0].get('content'))[:80]!r}",
        add_generation_prompt=True,
        ending=_PLACEHOLDER,
    )
