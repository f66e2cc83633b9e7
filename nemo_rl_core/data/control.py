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
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from nemo_rl_core.config.model import TEMPLATE_DATE
from nemo_rl_core.data.turns import Turn
from nemo_rl_core.errors import DataError

Rendered = tuple[str, list[int]]
"""A text and its token ids."""

_GUARD = "\U0010fffc"
_ALIAS = "\U0010fffd"
_ALIASES = re.compile(f"{_ALIAS}[\U00100000-\U0010fffb]{_ALIAS}")
"""An alias is a private character between two others: no text has all three in a row."""

_PROBE = "0"


def render(tokenizer: Any, turns: Sequence[Turn], *, what: str, **options: Any) -> str:
    """Renders a conversation with the chat template.

    Templates that read the clock get the date of the recipe (`model.template_date`), at midnight.

    Args:
        tokenizer: A tokenizer with a chat template.
        turns: The conversation.
        what: Name of the conversation in error messages.
        options: Keyword arguments of transformers' `apply_chat_template`.

    Raises:
        DataError: If the template fails.
    """
    try:
        day = date.fromisoformat(tokenizer.init_kwargs.get("template_date", TEMPLATE_DATE))
        text: str = tokenizer.apply_chat_template(
            list(turns),
            tokenize=False,
            strftime_now=datetime.combine(day, time()).strftime,
            **options,
        )
    # Named fault boundary: a template is code from the model's publisher and may raise anything.
    except Exception as error:
        raise DataError(
            f"the chat template cannot write {what}",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            fix="mend or remove the row, or take another chat template; an environment may answer "
            "as 'user'",
        ) from error
    return text


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
    guarded: str = _control_tokens(tokenizer, template).guarded(text)
    return guarded


def encode_guarded(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes a text that may be guarded; without a chat template, all of it as text.

    Raises:
        DataError: As for `encode_text`.
    """
    row = f"the text {text[:80].replace(_GUARD, '')!r}"
    if not tokenizer.chat_template:
        plain = text.replace(_GUARD, "")
        return encode_text(tokenizer, plain, row=row, add_special_tokens=add_special_tokens)
    if _GUARD not in text:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    reader = _reader(tokenizer, tokenizer.get_chat_template())
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
    control = _control_tokens(tokenizer, None)
    if control.may_be_in(text):
        plain = tokenizer.encode(text, **{**options, "add_special_tokens": False})
        if control.among(plain):
            raise _unsafe(row, "a text that is a control token in the tokenizer's own vocabulary")
    return ids


def spelled_control_tokens(tokenizer: Any, text: str) -> list[str]:
    """Returns the distinct special tokens that the tokenizer would find in a text."""
    control = _control_tokens(tokenizer, None)
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


@dataclass(frozen=True)
class _ControlTokens:
    """The control tokens of a tokenizer under a chat template.

    Attributes:
        texts: Ids by token text.
        counted: The ids, without the unknown token's.
        marks: Characters that control tokens begin and end with.
        pattern: Finds them in a text, the longest first.
    """

    texts: Mapping[str, int]
    counted: frozenset[int]
    marks: frozenset[str]
    pattern: re.Pattern[str]

    def among(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids that are control tokens."""
        return [token for token in ids if token in self.counted]

    def num_in(self, text: str) -> int:
        """Returns how many of the counted tokens a text holds."""
        return sum(self.texts[found] in self.counted for found in self.pattern.findall(text))

    def may_be_in(self, text: str) -> bool:
        """Returns whether a text holds a character that a control token begins or ends with."""
        # A normalizer may make `<` of a wide or an accented one.
        return not self.marks.isdisjoint(unicodedata.normalize("NFKD", text))

    def guarded(self, value: Any) -> Any:
        """Guards every text in a value that may spell a control token.

        White space around a text is not guarded, since templates trim it.
        """
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.guarded(each) for each in value]
        # A normalizer may make `<` of a wide or an accented one.
        if not isinstance(value, str) or self.marks.isdisjoint(
            unicodedata.normalize("NFKD", value)
        ):
            return value
        core = value.strip()
        start = value.index(core)
        inner = _GUARD + _GUARD.join(core) + _GUARD
        return value[:start] + inner + value[start + len(core) :]

    def guarded_turns(self, turns: Sequence[Turn], row: str) -> list[Turn]:
        """Guards the texts of turns, except the roles, which templates compare.

        Raises:
            DataError: If a role spells a control token.
        """
        for turn in turns:
            if self.pattern.search(str(turn.get("role"))):
                raise _unsafe(row, f"the role {str(turn['role'])[:80]!r}")
        return [
            {**self.guarded(turn), **({"role": turn["role"]} if "role" in turn else {})}
            for turn in turns
        ]


@dataclass(frozen=True)
class _Reader:
    """A copy of a tokenizer that encodes control tokens as text and aliases as control tokens.

    Attributes:
        backend: The copy.
        aliases: The alias of each control token's text.
        ids: The control token that the id of an alias stands for.
        pattern: Finds control tokens in a text.
    """

    backend: Any
    aliases: Mapping[str, str]
    ids: Mapping[int, int]
    pattern: re.Pattern[str]

    def encode(self, guarded: str, row: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes a guarded text, in which only unguarded parts may be control tokens.

        Raises:
            DataError: If the text holds an alias.
        """
        if found := _ALIASES.search(guarded.replace(_GUARD, "")):
            raise _unsafe(row, f"{found[0]!a}, which stands for a control token here")
        marked = self.pattern.sub(lambda found: self.aliases[found[0]], guarded)
        text = marked.replace(_GUARD, "")
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self.ids.get(token, token) for token in ids]


def _encoded(
    tokenizer: Any, turns: Sequence[Turn], row: str, what: str, ending: str, options: dict[str, Any]
) -> tuple[str, str, list[int]]:
    """Returns a conversation's text, its text with guards where needed, and its token ids."""
    text = render(tokenizer, turns, what=what, **options) + ending
    refuse_lone_surrogates(text, row)
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
    template = tokenizer.get_chat_template()
    control = _control_tokens(tokenizer, template)
    guarded_turns = control.guarded_turns(turns, row)
    if guarded_turns == list(turns):
        return text, text, ids
    if not tokenizer.is_fast:  # Slow tokenizers cannot encode control tokens as text.
        if control.pattern.search(json.dumps(list(turns), ensure_ascii=False)):
            raise _unsafe(row, f"a tokenizer without tokenizer.json ({type(tokenizer).__name__})")
        return text, text, ids
    guarded = render(tokenizer, guarded_turns, what=what, **options) + ending
    written = _reader(tokenizer, template).encode(guarded, row)
    if len(control.among(written)) != control.num_in(guarded):
        raise _unsafe(row, "a text that is a control token in the tokenizer's own vocabulary")
    if control.among(ids) == control.among(written):
        return text, text, ids
    if guarded.replace(_GUARD, "") != text:
        raise _unsafe(row, "a chat template that reads or changes its contents")
    return text, guarded, written


def _unsafe(row: str, got: str) -> DataError:
    return DataError(
        f"{row} spells a control token, which cannot be encoded as text",
        expected="contents that can be distinguished from the chat template's text",
        got=got,
        fix="remove the control token's text from the row, or take another chat template",
    )


# The template is a part of the cache keys, since a tokenizer's template may be replaced.
@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, template: str | None) -> _ControlTokens:
    added = tokenizer.added_tokens_decoder
    found = {token for token, each in added.items() if each.special}
    if template is not None:
        found |= {token for token in _tokens_around_a_user_turn(tokenizer) if token in added}
    texts = {added[token].content: token for token in sorted(found) if added[token].content.strip()}
    longest_first = sorted(texts, key=len, reverse=True)
    return _ControlTokens(
        texts=texts,
        counted=frozenset(texts.values()) - _unknown(tokenizer),
        marks=frozenset(mark for text in texts for mark in (text[0], text[-1])),
        pattern=re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
    )


def _tokens_around_a_user_turn(tokenizer: Any) -> list[int]:
    probe = [{"role": "user", "content": _PROBE}]
    try:
        text = render(tokenizer, probe, what="a user's turn", add_generation_prompt=False)
    except DataError:  # A template may need more turns; then only the special tokens are known.
        return []
    return list(tokenizer.encode(text, add_special_tokens=False))


def _unknown(tokenizer: Any) -> set[int]:
    """The id of the unknown token; empty if that id is another special token too."""
    doubles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return {tokenizer.unk_token_id} - doubles


@lru_cache(maxsize=8)
def _reader(tokenizer: Any, template: str | None) -> _Reader:
    from tokenizers import AddedToken, Tokenizer

    control = _control_tokens(tokenizer, template)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for each in state["added_tokens"]:
        each["special"] = each["special"] or each["content"] in control.texts
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    aliases = {
        text: _ALIAS + chr(0x100000 + index) + _ALIAS for index, text in enumerate(control.texts)
    }
    for text, token in control.texts.items():
        given = tokenizer.added_tokens_decoder[token]
        same = {name: getattr(given, name) for name in ("single_word", "lstrip", "rstrip")}
        backend.add_tokens([AddedToken(aliases[text], normalized=False, special=False, **same)])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    ids = {vocabulary[aliases[text]]: token for text, token in control.texts.items()}
    return _Reader(backend, aliases, ids, control.pattern)
