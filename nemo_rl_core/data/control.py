"""Tokenization in which only the chat template can produce control tokens.

A tokenizer encodes `<|im_end|>` in a user's text like the one that the template writes: a prompt,
an answer or the output of a tool could close its turn and open a system turn. A conversation whose
contents could spell a control token is therefore rendered twice, the second time with a guard
character between the characters of its contents. Control tokens that remain in the guarded text
come from the template. If the unguarded text has no others, it is encoded unchanged, so that
ordinary rows keep their ids. Otherwise the template's control tokens are replaced by aliases, which
contents cannot contain, and the rest is encoded as text.

Control tokens are the special tokens, and the added tokens that the template writes around a user
turn. Contents may use other added tokens, such as `<think>`.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control_tokens import (
    GUARD,
    control_token_error,
    control_tokens,
    reader_of,
    render_turns,
)
from nemo_rl_core.data.turns import Turn
from nemo_rl_core.errors import DataError

Rendered = tuple[str, list[int]]
"""A text and its token ids."""

_IN_VOCABULARY = "a text that is a control token in the tokenizer's base vocabulary"


def encode_conversation(
    tokenizer: Any,
    turns: Sequence[Turn],
    *,
    row: str,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    after: str = "",
    what: str | None = None,
) -> Rendered:
    """Tokenizes a conversation; contents that spell control tokens are encoded as text.

    Args:
        tools: JSON schemas of functions.
        after: Text in front of the part to encode; all of the conversation by default.
        what: Name of the conversation in the error of a failing template; `row` by default.
    """
    options = {"add_generation_prompt": add_generation_prompt, **_tool_options(tools)}
    text, _, ids = _encoded(tokenizer, turns, row, what or row, after, options)
    return text, ids


def guarded_conversation(tokenizer: Any, turns: Sequence[Turn], *, row: str, **options: Any) -> str:
    """Renders a conversation, with guards in contents that would spell control tokens.

    For callers that extend or send the text before `encode_guarded` encodes it.

    Args:
        options: Keyword arguments of transformers' `apply_chat_template`.
    """
    return _encoded(tokenizer, turns, row, row, "", options)[1]


def guarded_text(tokenizer: Any, text: str) -> str:
    """Guards a text, to append it to a guarded conversation, if it may spell a control token."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    guarded: str = control_tokens(tokenizer, template).guarded(text)
    return guarded


def encode_guarded(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes a text that may be guarded; without a chat template, all of it as plain text."""
    row = f"the text {text[:80].replace(GUARD, '')!r}"
    if not tokenizer.chat_template:
        plain = text.replace(GUARD, "")
        return encode_text(tokenizer, plain, row=row, add_special_tokens=add_special_tokens)
    if GUARD not in text:
        ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    else:
        reader = reader_of(tokenizer, tokenizer.get_chat_template())
        ids = reader.encode(text, row, add_special_tokens=add_special_tokens)
    return _without_ending(tokenizer, ids) if add_special_tokens else ids


def encode_text(
    tokenizer: Any, text: str, *, row: str, add_special_tokens: bool = True
) -> list[int]:
    """Encodes a text that no template has rendered, as plain text without control tokens.

    Args:
        add_special_tokens: Whether the tokenizer adds its start tokens. Its end tokens are always
            left out, since a completion or the end-of-sequence token follows.
    """
    refuse_lone_surrogates(text, row)
    options = {"split_special_tokens": True, "add_special_tokens": add_special_tokens}
    ids: list[int] = list(tokenizer.encode(text, **options))
    control = control_tokens(tokenizer, None)
    if control.may_be_in(text):
        plain = tokenizer.encode(text, **{**options, "add_special_tokens": False})
        if control.among(plain):
            raise control_token_error(row, _IN_VOCABULARY)
    return _without_ending(tokenizer, ids) if add_special_tokens else ids


def _without_ending(tokenizer: Any, ids: list[int]) -> list[int]:
    """Removes the tokens that the tokenizer's post-processor adds after a text."""
    processor = str(tokenizer.backend_tokenizer.post_processor) if tokenizer.is_fast else ""
    return ids[: len(ids) - _num_appended(tokenizer, processor)]


@lru_cache(maxsize=8)  # keyed by the post-processor too, since it may be replaced
def _num_appended(tokenizer: Any, post_processor: str) -> int:
    plain = tokenizer.encode("0", add_special_tokens=False)
    full = tokenizer.encode("0")
    starts = range(len(full) - len(plain) + 1)
    start = next((n for n in starts if full[n : n + len(plain)] == plain), len(full))
    return max(0, len(full) - start - len(plain))


def spelled_control_tokens(tokenizer: Any, text: str) -> list[str]:
    """Returns the distinct special tokens that the tokenizer would encode in a text."""
    control = control_tokens(tokenizer, None)
    if not control.may_be_in(text):
        return []
    ids = control.among(tokenizer.encode(text, add_special_tokens=False))
    return list(dict.fromkeys(tokenizer.convert_ids_to_tokens(ids)))


def refuse_lone_surrogates(text: str, row: str) -> None:
    """Raises a `DataError` that names the row if UTF-8 cannot encode its text."""
    if has_lone_surrogate(text):
        raise DataError(
            f"{row} has half of a surrogate pair, which is not a character",
            expected="text that UTF-8 can write",
            fix="replace \\ud800 to \\udfff with the intended characters, or remove the row",
        )


def has_lone_surrogate(text: str) -> bool:
    """Whether a text has an unpaired surrogate, which UTF-8 cannot encode.

    Example:
        >>> has_lone_surrogate("\\ud800="), has_lone_surrogate("𝄞")
        (True, False)
    """
    if text.isascii():  # reads a flag, not the text
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _tool_options(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"tools": [*tools]} if tools else {}


def _encoded(
    tokenizer: Any, turns: Sequence[Turn], row: str, what: str, after: str, options: dict[str, Any]
) -> tuple[str, str, list[int]]:
    """Returns a conversation's text, its text with guards where needed, and its token ids."""

    def rendered(turns: Sequence[Turn], tools: Any) -> str:
        text = render_turns(tokenizer, turns, what=what, **options | _tool_options(tools or ()))
        if not after:
            return text
        if after not in text:
            raise DataError(
                f"the chat template does not write the assistant's turn in {row}",
                got=repr(text[-80:]),
                fix="use a chat template that writes calls of tools, or write them as text",
            )
        return text[text.rindex(after) + len(after) :]

    tools = options.get("tools")
    text = rendered(turns, tools)
    refuse_lone_surrogates(text, row)
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
    template = tokenizer.get_chat_template()
    control = control_tokens(tokenizer, template)
    guarded_turns, guarded_tools = control.guarded_turns(turns, row), control.guarded(tools)
    if guarded_turns == list(turns) and guarded_tools == tools:
        return text, text, ids
    if not tokenizer.is_fast:  # Slow tokenizers cannot encode control tokens as text.
        if control.pattern.search(json.dumps([*turns, tools], ensure_ascii=False)):
            raise control_token_error(
                row, f"a tokenizer without tokenizer.json ({type(tokenizer).__name__})"
            )
        return text, text, ids
    guarded = rendered(guarded_turns, guarded_tools)
    guarded_ids = reader_of(tokenizer, template).encode(guarded, row)
    if len(control.among(guarded_ids)) != control.num_in(guarded):
        raise control_token_error(row, _IN_VOCABULARY)
    if control.among(ids) == control.among(guarded_ids):
        return text, text, ids
    if guarded.replace(GUARD, "") != text:
        raise control_token_error(row, "a chat template that reads or changes its contents")
    return text, guarded, guarded_ids
