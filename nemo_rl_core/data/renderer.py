"""Tokens of conversations, and of the turns that follow a sampled turn.

The policy's tokens stay as sampled: they are neither decoded nor encoded again. The tokens after
them are the end of a rendering of the full conversation, with a placeholder for the sampled turn.
If a template writes past turns like new ones, the result equals its rendering. Other templates
rewrite past turns when others follow: they remove reasoning, for example. Such a difference is
logged once for each template.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control import Rendered, encode_conversation, encode_text
from nemo_rl_core.data.control_tokens import control_token_error, control_tokens, render_turns
from nemo_rl_core.data.turns import Turn, num_shared
from nemo_rl_core.data.written import refuse_silent_turns, refuse_unwritten
from nemo_rl_core.errors import DataError

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as in OpenAI's API."""

MARK = "\U0010fffb"
"""Text that no conversation has."""

_CONTEXT = "0"
"""Text before the encoded part, which no template trims and no tokenizer merges with it."""


class Renderer:
    """Writes conversations as tokens, and continues sampled ones without rendering their past.

    Args:
        tokenizer: A transformers tokenizer. Without a chat template, texts are encoded unchanged.

    Example:
        >>> from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
        >>> tokenizer = build_arithmetic_tokenizer()
        >>> turns = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
        >>> new = [{"role": "user", "content": "7"}]
        >>> ids = Renderer(tokenizer).continuation(turns, new, last_token=5, row="a turn")
        >>> tokenizer.decode(ids)
        '<eos>7'
        >>> ids = Renderer(tokenizer).continuation(turns, new, last_token=2, row="a turn")
        >>> tokenizer.decode(ids)
        '7'
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def rewrites_history(self) -> bool:
        """Whether the template writes past turns differently from new ones."""
        tokenizer = self._tokenizer
        return bool(tokenizer.chat_template) and rewrites_past(
            tokenizer, tokenizer.get_chat_template()
        )

    @property
    def _control(self) -> frozenset[int]:
        tokenizer = self._tokenizer
        control = control_tokens(tokenizer, tokenizer.get_chat_template()).counted
        return control | {tokenizer.eos_token_id}

    def opening(self, turns: Sequence[Turn], *, tools: Tools = (), row: str) -> list[int]:
        """Returns the tokens of a conversation up to the start of the assistant's next turn."""
        tokenizer = self._tokenizer
        refuse_unwritten(tokenizer, turns, tools=tools, row=row)
        _, ids = rendered_conversation(
            tokenizer, turns, row, add_generation_prompt=True, tools=tools
        )
        if not ids:
            raise DataError(
                f"{row} has no tokens",
                expected="at least one token to sample after",
                got="a chat template that writes nothing" if tokenizer.chat_template else "no text",
                fix="remove the row, or use another chat template",
            )
        return ids

    def continuation(
        self,
        turns: Sequence[Turn],
        new: Sequence[Turn],
        *,
        tools: Tools = (),
        last_token: int | None,
        row: str,
    ) -> list[int]:
        """Returns the tokens between a sampled turn and the assistant's next turn.

        Args:
            turns: The conversation up to the sampled turn, whose tool calls some templates read.
            new: Turns after it; the role `environment` is rendered as `user`, and so is the result
                of a tool where the template writes it only after a call.
            last_token: The last sampled token; a token that ends the turn is not repeated.
        """
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            text = "".join(turn["content"] for turn in new)
            return encode_text(tokenizer, text, row=row, add_special_tokens=False)
        rewrites_past(tokenizer, tokenizer.get_chat_template())
        new = [turn | {"role": "user"} if turn["role"] == "environment" else turn for turn in new]
        if MARK in json.dumps(new, ensure_ascii=False):
            raise control_token_error(row, f"{MARK!a}, which is reserved")
        *past, sampled = turns
        if calls := sampled.get("tool_calls"):
            calling = [*past, _calling(calls)]
            text = render_turns(tokenizer, calling, what=row, add_generation_prompt=False)
            if MARK in text:  # otherwise the calls are text
                return self._continued(calling, new, tools, last_token, row)
        past.append({"role": "assistant", "content": f"{MARK}{_CONTEXT}"})
        try:
            return self._continued(past, new, tools, last_token, row)
        except DataError:
            if all(turn["role"] != "tool" for turn in new):
                raise
            _warn_of_lone_results(tokenizer.get_chat_template())
        new = [{"role": "user", "content": "\n\n".join(turn["content"] for turn in new)}]
        return self._continued(past, new, tools, last_token, row)

    def _continued(
        self, past: list[Turn], new: list[Turn], tools: Tools, last_token: int | None, row: str
    ) -> list[int]:
        tokenizer = self._tokenizer
        refuse_silent_turns(tokenizer, [*({**turn, "content": ""} for turn in past), *new], row)
        ids = self._after_mark([*past, *new], tools, row, is_open=True)
        end, has_calls = 0, "tool_calls" in past[-1]
        if has_calls or last_token != ids[0]:
            closing = self._after_mark(past, tools, row, is_open=False)
            if has_calls:
                end = self._end_of_calls(ids, closing)
            # Ended like the last turn of a conversation; a turn that was cut may end with any text.
            if last_token in self._control and last_token in closing[end:]:
                written = closing[end : closing.index(last_token, end) + 1]
                return ids[end + max(1, num_shared(ids[end:], written)) :]
        return ids[end + 1 :] if last_token in ids[end : end + 1] else ids[end:]

    def _after_mark(
        self, turns: Sequence[Turn], tools: Tools, row: str, *, is_open: bool
    ) -> list[int]:
        """Returns the tokens after the placeholder."""
        ids = encode_conversation(
            self._tokenizer,
            turns,
            row=row,
            what=f"a turn of {turns[-1]['role']!r} after the assistant's",
            add_generation_prompt=is_open,
            tools=tools,
            after=MARK,
        )[1]
        context = self._tokenizer.encode(_CONTEXT, add_special_tokens=False)
        if ids[: len(context)] != context:
            raise DataError(
                "the tokenizer joins the end of the assistant's turn with the text after it",
                expected=f"tokens that start with {context}",
                got=str(ids[: len(context) + 1]),
                fix="use a chat template that ends turns with a separate token",
            )
        return ids[len(context) :]

    def _end_of_calls(self, ids: list[int], closing: list[int]) -> int:
        """Returns the index of the token that ends a turn with calls."""
        shared = num_shared(ids, closing)
        ends = [index for index, token in enumerate(closing[:shared]) if token in self._control]
        is_last = ends and not self._tokenizer.decode(closing[ends[-1] + 1 :]).strip()
        return ends[-1] if is_last else shared


def _calling(calls: Sequence[Mapping[str, Any]]) -> Turn:
    """Returns a turn with calls of the same functions, whose last text is known."""
    arguments = {"x": f"{MARK}{_CONTEXT}"}
    functions = [{**call.get("function", call), "arguments": arguments} for call in calls]
    pairs = zip(calls, functions, strict=True)
    calls = [{"type": "function", **call, "function": function} for call, function in pairs]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@lru_cache(maxsize=8)
def _warn_of_lone_results(template: str) -> None:
    logger.warning("the chat template writes no result without a call: such results are user turns")


@lru_cache(maxsize=8)
def rewrites_past(tokenizer: Any, template: str) -> bool:
    """Whether a chat template writes an assistant's turn differently when others follow.

    Args:
        template: The tokenizer's template, which may be replaced; a part of the cache key.

    Raises:
        DataError: If the text after a turn depends on the turn, so that it cannot be continued.
    """
    question = {"role": "user", "content": _CONTEXT}

    def rendered(answer: str) -> str:
        turns = [question, {"role": "assistant", "content": answer}, question]
        return render_turns(tokenizer, turns, what="two turns", add_generation_prompt=True)

    answer = f"{MARK}{_CONTEXT}"
    text = rendered(answer)
    reasoned = rendered(f"<think>\n1\n</think>\n\n{answer}")
    ends = [text.partition(answer)[2], reasoned.partition(answer)[2]]
    if not ends[0] or ends[0] != ends[1]:
        raise DataError(
            "the chat template's text after the assistant's turn depends on that turn",
            expected=f"the assistant's turn, and then {ends[0][:40]!r}",
            got=repr(ends[1][:40]),
            fix="use a chat template that writes what follows a turn independently of the turn",
        )
    opening = render_turns(tokenizer, [question], what="a turn", add_generation_prompt=True)
    if not text.startswith(opening + answer):
        difference = f"it starts a new turn with {opening[-30:]!r}, and a past one with "
        difference += repr(text.partition(answer)[0][-30:])
    elif "<think>" not in reasoned:
        difference = "it removes their reasoning"
    else:
        return False
    logger.warning(
        "the chat template rewrites past turns of the assistant (%s); they stay as they were "
        "sampled, or trained on, unless rollouts.history is 'split'",
        difference,
    )
    return True


def rendered_conversation(
    tokenizer: Any,
    turns: Sequence[Turn],
    row: str,
    *,
    add_generation_prompt: bool,
    tools: Tools = (),
) -> Rendered:
    """Returns the text and token ids of a conversation; without a template, of one exchange."""
    if tokenizer.chat_template:
        return encode_conversation(
            tokenizer, turns, row=row, add_generation_prompt=add_generation_prompt, tools=tools
        )
    if [turn["role"] for turn in turns] not in (["user"], ["user", "assistant"]):
        raise DataError(
            f"{row} has several turns, but the tokenizer has no chat template to write them",
            expected="one user turn and one assistant turn",
            got=", ".join(str(turn["role"]) for turn in turns)[:80],
            fix="use the tokenizer of a chat model, or set its chat_template",
        )
    text = "".join(turn["content"] for turn in turns)
    return text, encode_text(tokenizer, text, row=row)
