"""Control tokens of a tokenizer, and how to encode texts without them."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from nemo_rl_core.config.model import TEMPLATE_DATE
from nemo_rl_core.data.turns import FLAG, Turn
from nemo_rl_core.data.unknown import unknown_token_id
from nemo_rl_core.errors import DataError

GUARD = "\U0010fffc"
_ALIAS = "\U0010fffd"
_ALIASES = re.compile(f"{_ALIAS}[\U00100000-\U0010fffb]{_ALIAS}")
"""Aliases: a private-use character between two others, a sequence that no real text has."""

_PROBE = "0"


def render_turns(tokenizer: Any, turns: Sequence[Turn], *, what: str, **options: Any) -> str:
    """Renders a conversation with the chat template.

    Templates that read the clock get the date of the recipe (`model.template_date`), at midnight.
    A developer turn becomes a system turn for templates without that role. Templates that
    concatenate the arguments of tool calls get them as JSON text.
    """
    readable = _as_the_template_reads(tokenizer, turns)
    try:
        try:
            return _render(tokenizer, readable, options)
        except TypeError:
            if not any(turn.get("tool_calls") for turn in readable):
                raise
            return _render(tokenizer, [_with_text_arguments(turn) for turn in readable], options)
    # Fault boundary: a template is code from the model's publisher and may raise anything.
    except Exception as error:
        raise DataError(
            f"the chat template cannot write {what}",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            fix="correct or remove the row, or use another chat template; an environment may "
            "answer as 'user'",
        ) from error


def _render(tokenizer: Any, turns: list[Turn], options: dict[str, Any]) -> str:
    day = date.fromisoformat(tokenizer.init_kwargs.get("template_date", TEMPLATE_DATE))
    text: str = tokenizer.apply_chat_template(
        turns, tokenize=False, strftime_now=datetime.combine(day, time()).strftime, **options
    )
    return text


def _as_the_template_reads(tokenizer: Any, turns: Sequence[Turn]) -> list[Turn]:
    readable = [{key: value for key, value in turn.items() if key != FLAG} for turn in turns]
    template = str(tokenizer.get_chat_template())
    if readable and readable[0].get("role") == "developer" and "developer" not in template:
        readable[0]["role"] = "system"
    if re.search(r"content['\"]?\]? is none", template):  # DeepSeek's for calls without text
        for turn in readable:
            if turn.get("tool_calls") and not turn.get("content"):
                turn["content"] = None
    if not _writes_text(tokenizer, template):  # LLaVA's
        for turn in readable:
            turn["content"] = [{"type": "text", "text": turn.get("content")}]
    if "'environment'" in template and "'tool'" not in template:  # OLMo 3's
        for turn in readable:
            turn["role"] = "environment" if turn["role"] == "tool" else turn["role"]
    return readable


@lru_cache(maxsize=16)
def _writes_text(tokenizer: Any, template: str) -> bool:
    """Whether the template writes contents that are texts, and not only lists of parts."""
    try:
        return _PROBE in _render(tokenizer, [{"role": "user", "content": _PROBE}], {})
    except Exception:  # noqa: BLE001 (fault boundary: a template may raise anything)
        return True


def _with_text_arguments(turn: Turn) -> Turn:
    def text_of(call: Any) -> Any:
        function = call["function"]
        text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    calls = turn.get("tool_calls")
    return {**turn, "tool_calls": [text_of(call) for call in calls]} if calls else turn


@dataclass(frozen=True)
class _ControlTokens:
    """The control tokens of a tokenizer under a chat template.

    Attributes:
        texts: Token ids by text.
        counted: Token ids without that of the unknown token.
        marks: First and last characters of the control tokens.
        pattern: Expression that matches control tokens, the longest first.
    """

    texts: Mapping[str, int]
    counted: frozenset[int]
    marks: frozenset[str]
    pattern: re.Pattern[str]

    def among(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids that are control tokens."""
        return [token for token in ids if token in self.counted]

    def num_in(self, text: str) -> int:
        """Returns the number of counted tokens in a text."""
        return sum(self.texts[token] in self.counted for token in self.pattern.findall(text))

    def may_be_in(self, text: str) -> bool:
        """Whether a text has the first or last character of a control token."""
        # A normalizer may turn a wide or an accented `<` into a plain one.
        return not self.marks.isdisjoint(unicodedata.normalize("NFKD", text))

    def guarded(self, value: Any) -> Any:
        """Guards every text in a value that may contain a control token.

        White space around a text is not guarded, since templates trim it.
        """
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guarded(item) for item in value]
        if not isinstance(value, str) or not self.may_be_in(value):
            return value
        core = value.strip()
        start = value.index(core)
        inner = GUARD + GUARD.join(core) + GUARD
        return value[:start] + inner + value[start + len(core) :]

    def guarded_turns(self, turns: Sequence[Turn], row: str) -> list[Turn]:
        """Guards the texts of turns, except the roles, which templates compare."""
        for turn in turns:
            if self.pattern.search(str(turn.get("role"))):
                raise control_token_error(row, f"the role {str(turn['role'])[:80]!r}")
        return [
            {**self.guarded(turn), **({"role": turn["role"]} if "role" in turn else {})}
            for turn in turns
        ]


@dataclass(frozen=True)
class _Reader:
    """A copy of a tokenizer that encodes control tokens as text and aliases as control tokens.

    Attributes:
        backend: The copy, a `tokenizers.Tokenizer`.
        aliases: Alias of each control token's text.
        ids: Id of the control token by id of its alias.
        pattern: Expression that matches control tokens.
    """

    backend: Any
    aliases: Mapping[str, str]
    ids: Mapping[int, int]
    pattern: re.Pattern[str]

    def encode(self, guarded: str, row: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes a guarded text, in which only unguarded parts may be control tokens."""
        if match := _ALIASES.search(guarded.replace(GUARD, "")):
            raise control_token_error(row, f"{match[0]!a}, which is reserved for a control token")
        marked = self.pattern.sub(lambda match: self.aliases[match[0]], guarded)
        text = marked.replace(GUARD, "")
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self.ids.get(token, token) for token in ids]


def control_token_error(row: str, got: str) -> DataError:
    """Returns the error for a row whose contents spell a control token."""
    return DataError(
        f"{row} spells a control token, which cannot be encoded as text",
        expected="contents that can be distinguished from the chat template's text",
        got=got,
        fix="remove the control token's text from the row, or use another chat template",
    )


# The template is part of the cache keys, since a tokenizer's template may be replaced.
@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any, template: str | None) -> _ControlTokens:
    """Returns the control tokens of a tokenizer under a chat template."""
    added = tokenizer.added_tokens_decoder
    control_ids = {token for token, added_token in added.items() if added_token.special}
    if template is not None:
        control_ids |= {token for token in _tokens_around_a_user_turn(tokenizer) if token in added}
    texts = {
        added[token].content: token for token in sorted(control_ids) if added[token].content.strip()
    }
    longest_first = sorted(texts, key=len, reverse=True)
    return _ControlTokens(
        texts=texts,
        counted=frozenset(texts.values()).difference({unknown_token_id(tokenizer)}),
        marks=frozenset(mark for text in texts for mark in (text[0], text[-1])),
        pattern=re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
    )


def _tokens_around_a_user_turn(tokenizer: Any) -> list[int]:
    probe = [{"role": "user", "content": _PROBE}]
    try:
        text = render_turns(tokenizer, probe, what="a user's turn", add_generation_prompt=False)
    except DataError:  # A template may need more turns; use only the special tokens then.
        return []
    return list(tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=8)
def reader_of(tokenizer: Any, template: str | None) -> _Reader:
    """Returns an encoder under which no content can spell a control token."""
    from tokenizers import AddedToken, Tokenizer

    control = control_tokens(tokenizer, template)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for added_token in state["added_tokens"]:
        added_token["special"] |= added_token["content"] in control.texts
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    aliases = {
        text: _ALIAS + chr(0x100000 + index) + _ALIAS for index, text in enumerate(control.texts)
    }
    for text, token in control.texts.items():
        original = tokenizer.added_tokens_decoder[token]
        original_options = {
            name: getattr(original, name) for name in ("single_word", "lstrip", "rstrip")
        }
        backend.add_tokens(
            [AddedToken(aliases[text], normalized=False, special=False, **original_options)]
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    ids = {vocabulary[aliases[text]]: token for text, token in control.texts.items()}
    return _Reader(backend, aliases, ids, control.pattern)
