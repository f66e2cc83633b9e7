"""Control tokens of a tokenizer: which they are, and texts without them."""

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

GUARD = "\U0010fffc"
_ALIAS = "\U0010fffd"
_ALIASES = re.compile(f"{_ALIAS}[\U00100000-\U0010fffb]{_ALIAS}")
"""An alias is a private character between two others: no text has all three in a row."""

_PROBE = "0"


def render_turns(tokenizer: Any, turns: Sequence[Turn], *, what: str, **options: Any) -> str:
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
        inner = GUARD + GUARD.join(core) + GUARD
        return value[:start] + inner + value[start + len(core) :]

    def guarded_turns(self, turns: Sequence[Turn], row: str) -> list[Turn]:
        """Guards the texts of turns, except the roles, which templates compare.

        Raises:
            DataError: If a role spells a control token.
        """
        for turn in turns:
            if self.pattern.search(str(turn.get("role"))):
                raise unsafe(row, f"the role {str(turn['role'])[:80]!r}")
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
        if found := _ALIASES.search(guarded.replace(GUARD, "")):
            raise unsafe(row, f"{found[0]!a}, which stands for a control token here")
        marked = self.pattern.sub(lambda found: self.aliases[found[0]], guarded)
        text = marked.replace(GUARD, "")
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self.ids.get(token, token) for token in ids]


def unsafe(row: str, got: str) -> DataError:
    """The error of a row whose contents spell a control token."""
    return DataError(
        f"{row} spells a control token, which cannot be encoded as text",
        expected="contents that can be distinguished from the chat template's text",
        got=got,
        fix="remove the control token's text from the row, or take another chat template",
    )


# The template is a part of the cache keys, since a tokenizer's template may be replaced.
@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any, template: str | None) -> _ControlTokens:
    """The control tokens of a tokenizer under a chat template."""
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
        text = render_turns(tokenizer, probe, what="a user's turn", add_generation_prompt=False)
    except DataError:  # A template may need more turns; then only the special tokens are known.
        return []
    return list(tokenizer.encode(text, add_special_tokens=False))


def _unknown(tokenizer: Any) -> set[int]:
    """The id of the unknown token; empty if that id is another special token too."""
    doubles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return {tokenizer.unk_token_id} - doubles


@lru_cache(maxsize=8)
def reader_of(tokenizer: Any, template: str | None) -> _Reader:
    """What encodes text in which no content can spell a control token."""
    from tokenizers import AddedToken, Tokenizer

    control = control_tokens(tokenizer, template)
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
