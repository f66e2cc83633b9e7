"""Another speaker's turn behind a turn of the policy, as token ids.

The policy's tokens stay as they were sampled: they are neither decoded nor encoded again. What
comes behind them is found by rendering a conversation with a stand-in for the policy's turn, once
up to the stand-in and once with the reply, and taking the tokens between. A template that opens the
assistant's turn in another way than it writes it down later (with `<think>`, for example) is
refused: the model would see another conversation while it plays than any that it was made for.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl_core.data.control import encode_conversation, encode_text
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.errors import DataError

_STAND_IN = "0"
"""A turn that no template trims and no tokenizer joins to the token behind it."""

_ROLES = {"environment": "user"}
"""What a role is called in chat templates, where it is called otherwise."""


def reply_token_ids(
    tokenizer: Any, prompt: str, reply: Mapping[str, str], *, last_token: int | None
) -> list[int]:
    """The tokens to append to the policy's turn, up to where its next turn begins.

    Args:
        tokenizer: A transformers tokenizer. Without a chat template the reply's text follows as it
            stands.
        prompt: The text of the first turn, or the JSON of the first turns.
        reply: `role` and `content`; the role `environment` is a template's `user`.
        last_token: The policy's last token; where it is the one that ends a turn, that one is not
            repeated.

    Raises:
        DataError: If the template cannot write such a turn, or writes what came before differently
            once it follows; or the reply spells a control token that cannot be written as text.

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
        {"role": "assistant", "content": _STAND_IN},
        {"role": role, "content": reply["content"]},
    ]
    named = {"row": row, "what": f"a turn of {role!r} behind the assistant's"}
    before, before_ids = encode_conversation(
        tokenizer, turns, **named, add_generation_prompt=True, ending=_STAND_IN
    )
    whole, whole_ids = encode_conversation(
        tokenizer, [*turns, *behind], **named, add_generation_prompt=True
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
