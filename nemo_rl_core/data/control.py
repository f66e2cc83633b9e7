"""Tokenization in which only the chat template can produce control tokens.

A tokenizer encodes `<|im_end|>` in a user's text like the template's own: a prompt, an answer or
the output of a tool could close its turn and open a system turn. A conversation whose contents
could spell a control token is therefore rendered twice, the second time with a guard character
between the characters of its contents. Control tokens that remain in the guarded text are the
template's. If the unguarded text has no others, it is encoded as it is, so that ordinary rows keep
their ids. Otherwise the template's control tokens are replaced by aliases, which no content spells,
and the rest is encoded as text.

Control tokens are the special ones, and those added tokens that the template writes around a user's
turn. Contents may use other added tokens, such as `<think>`.
"""

import json
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.data.control_tokens import (
    GUARD,
    control_tokens,
    reader_of,
    render_turns,
    unsafe,
)
from nemo_rl_core.data.turns import Turn
from nemo_rl_core.errors import DataError

Rendered = tuple[str, list[int]]
"""A text and its token ids."""


def encode_conversation(
    tokenizer: Any,
    turns: Sequence[Turn],
    *,
    row: str,
    add_generation_prompt: bool,
    ending: str = "",
    what: str | None = None,
) -> Rendered:
    """Tokenizes a conversation; contents that spell control tokens are encoded as text.

    Args:
        tokenizer: A tokenizer with a chat template.
        turns: The conversation.
        row: Name of the conversation in error messages.
        add_generation_prompt: Whether to open the assistant's turn at the end.
        ending: Text to append, without control tokens.
        what: Name for the error of a failing template; `row` by default.

    Raises:
        DataError: If the template fails, or contents that spell control tokens cannot be
            distinguished from the template's text.
    """
    options = {"add_generation_prompt": add_generation_prompt}
    text, _, ids = _encoded(tokenizer, turns, row, what or row, ending, options)
    return text, ids


def guarded_conversation(tokenizer: Any, turns: Sequence[Turn], *, row: str, **options: Any) -> str:
    """Renders a conversation, with guards in contents that would spell control tokens.

    For callers that pass the text on before `encode_guarded` encodes it.

    Args:
        tokenizer: A tokenizer with a chat template.
        turns: The conversation.
        row: Name of the conversation in error messages.
        options: Keyword arguments of transformers' `apply_chat_template`.

    Raises:
        DataError: As for `encode_conversation`.
    """
    return _encoded(tokenizer, turns, row, row, "", options)[1]


def guarded_text(tokenizer: Any, text: str) -> str:
    """Guards a text, to append it to a guarded conversation, if it may spell a control token."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    guarded: str = control_tokens(tokenizer, template).guarded(text)
    return guarded


def encode_guarded(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes a text that may be guarded; without a chat template, all of it as text.

    Raises:
        DataError: As for `encode_text`.
    """
    row = f"the text {text[:80].replace(GUARD, '')!r}"
    if not tokenizer.chat_template:
        plain = text.replace(GUARD, "")
        return encode_text(tokenizer, plain, row=row, add_special_tokens=add_special_tokens)
    if GUARD not in text:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    reader = reader_of(tokenizer, tokenizer.get_chat_template())
    return reader.encode(text, row, add_special_tokens=add_special_tokens)


def encode_text(
    tokenizer: Any, text: str, *, row: str, add_special_tokens: bool = True
) -> list[int]:
    """Encodes a text that no template has rendered, without control tokens.

    Args:
        tokenizer: A transformers tokenizer.
        text: Unguarded text.
        row: Name of the text in error messages.
        add_special_tokens: Whether the tokenizer adds its start and end tokens.

    Raises:
        DataError: If the text cannot be encoded without a control token.
    """
    refuse_lone_surrogates(text, row)
    options = {"split_special_tokens": True, "add_special_tokens": add_special_tokens}
    ids: list[int] = list(tokenizer.encode(text, **options))
    control = control_tokens(tokenizer, None)
    if control.may_be_in(text):
        plain = tokenizer.encode(text, **{**options, "add_special_tokens": False})
        if control.among(plain):
            raise unsafe(row, "a text that is a control token in the tokenizer's own vocabulary")
    return ids


def spelled_control_tokens(tokenizer: Any, text: str) -> list[str]:
    """Returns the distinct special tokens that the tokenizer would find in a text."""
    control = control_tokens(tokenizer, None)
    if not control.may_be_in(text):
        return []
    found = control.among(tokenizer.encode(text, add_special_tokens=False))
    return list(dict.fromkeys(tokenizer.convert_ids_to_tokens(found)))


def refuse_lone_surrogates(text: str, row: str) -> None:
    """Raises if a text holds an unpaired surrogate, which UTF-8 cannot encode.

    Raises:
        DataError: Naming the row.
    """
    if has_lone_surrogate(text):
        raise DataError(
            f"{row} holds half of a surrogate pair, which is no character",
            expected="text that UTF-8 can write",
            fix="replace \\ud800 to \\udfff by the characters that were meant, or remove the row",
        )


def has_lone_surrogate(text: str) -> bool:
    """Returns whether a text holds an unpaired surrogate, which UTF-8 cannot encode.

    Example:
        >>> has_lone_surrogate("\\ud800="), has_lone_surrogate("𝄞")
        (True, False)
    """
    if text.isascii():  # known without a look at the text
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _encoded(
    tokenizer: Any, turns: Sequence[Turn], row: str, what: str, ending: str, options: dict[str, Any]
) -> tuple[str, str, list[int]]:
    """Returns a conversation's text, its text with guards where needed, and its token ids."""
    text = render_turns(tokenizer, turns, what=what, **options) + ending
    refuse_lone_surrogates(text, row)
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
    template = tokenizer.get_chat_template()
    control = control_tokens(tokenizer, template)
    guarded_turns = control.guarded_turns(turns, row)
    if guarded_turns == list(turns):
        return text, text, ids
    if not tokenizer.is_fast:  # Slow tokenizers cannot encode control tokens as text.
        if control.pattern.search(json.dumps(list(turns), ensure_ascii=False)):
            raise unsafe(row, f"a tokenizer without tokenizer.json ({type(tokenizer).__name__})")
        return text, text, ids
    guarded = render_turns(tokenizer, guarded_turns, what=what, **options) + ending
    written = reader_of(tokenizer, template).encode(guarded, row)
    if len(control.among(written)) != control.num_in(guarded):
        raise unsafe(row, "a text that is a control token in the tokenizer's own vocabulary")
    if control.among(ids) == control.among(written):
        return text, text, ids
    if guarded.replace(GUARD, "") != text:
        raise unsafe(row, "a chat template that reads or changes its contents")
    return text, guarded, written
