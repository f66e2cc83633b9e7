"""Content, reasoning and tool calls of sampled turns, read by vLLM's parsers.

A parser is chosen by what the chat template contains, and then proven: turns with calls and
reasoning are written by the template and must be read back unchanged. Importing the parsers takes
3 CPU-s, once per process and only when tools are used.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.call_formats import FORMATS, THINK, CallFormat
from nemo_rl_core.data.control_tokens import render_turns
from nemo_rl_core.data.renderer import Tools
from nemo_rl_core.data.turns import Turn
from nemo_rl_core.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the assistant as read from its tokens.

    Attributes:
        turn: Turn with `content`, and `reasoning_content` and `tool_calls` if there are any.
        faults: Texts for the model about calls that could not be read and are not in `turn`.
    """

    turn: Turn
    faults: tuple[str, ...] = ()


class TurnReader:
    """Reads the content, reasoning and tool calls of a sampled turn.

    Args:
        tokenizer: A transformers tokenizer, which may name a tool parser of vLLM
            (`model.tool_parser`). Otherwise the parser follows from the chat template.

    Example:
        >>> from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
        >>> TurnReader(build_arithmetic_tokenizer()).read([6, 7, 2]).turn
        {'role': 'assistant', 'content': '23'}
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def require_calls(self) -> str:
        """Returns the name of the parser that reads calls, once proven against the template.

        Raises:
            ConfigError: If no parser reads the calls that the template writes.
        """
        return self._proven().form.parser

    def read(self, token_ids: Sequence[int], *, tools: Tools = ()) -> SampledTurn:
        """Reads a turn, with or without its end token.

        Without tools or a chat template, the content is the text and nothing else is read. The id
        of a call is the sampled one, or is derived from the tokens.
        """
        ids = [int(token) for token in token_ids]
        if tools and self._tokenizer.chat_template:
            turn = self._proven().read(ids, tools)
            if turn is not None:
                return turn
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return SampledTurn({"role": "assistant", "content": text})

    def _proven(self) -> "_CallParser":
        name = self._tokenizer.init_kwargs.get("tool_parser")
        return _proven(self._tokenizer, _template(self._tokenizer), name)


_Calls = list[tuple[str, str, str]]
"""Ids, names, and arguments as JSON."""


class _CallParser:
    """Parser of a format for a tokenizer.

    A generation prompt may open, and close, the reasoning: that part belongs to the turn here.
    """

    def __init__(self, tokenizer: Any, form: CallFormat) -> None:
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        for package in ("parser", "reasoning", "tool_parsers"):  # a traceback per broken call
            logging.getLogger(f"vllm.{package}").setLevel(logging.CRITICAL + 1)
        self.form, self._tokenizer = form, get_cached_tokenizer(tokenizer)
        think = THINK if THINK[0] in _template(tokenizer) else ("", None)
        self._start, reasoning = form.reasoning or think
        self._drops_text_before = reasoning == THINK[1]  # text before the reasoning
        is_hf = form.parser == "hf"
        self._plain, self._thinking = (
            ParserManager.get_parser(
                tool_parser_name=form.parser, reasoning_parser_name=name, enable_auto_tools=True
            )
            for name in ("hf" if is_hf else None, reasoning)
        )
        self._options = {"response_template": form.template} if is_hf else {}
        for kind in (self._plain, self._thinking):
            kind(self._tokenizer, **self._options)  # refuses vocabularies without its tokens
        before = _rendered(tokenizer, [_USER])
        cue = _rendered(tokenizer, [_USER], add_generation_prompt=True).removeprefix(before)
        at = cue.find(self._start) if self._start else -1
        self._opening = cue[at:] if at >= 0 else ""
        self.header = before + cue.removesuffix(self._opening)
        added = tokenizer.added_tokens_decoder
        self._added = [token.content for token in added.values()]
        ends = [i for i, token in added.items() if token.special and token.content != form.end]
        self._ends = {i for i in ends if not self._begins(added[i].content)}

    def read(
        self, ids: list[int], tools: Tools, *, has_opening: bool = False
    ) -> SampledTurn | None:
        """Reads a turn; returns None for plain text.

        Args:
            has_opening: Whether the turn contains the part of the generation prompt.
        """
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:7]
        stop = next((i for i in range(len(ids), 0, -1) if ids[i - 1] not in self._ends), 0)
        text = self._tokenizer.decode(
            ids[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text = text if has_opening else self._opening + text
        begins, end = self._begins(text), self.form.end
        if self.form.begin and not begins and not self._thinks(text):
            return None
        request = _request(json.dumps(tools))
        faults: list[str] = []
        reasoning, content, calls = self._parse(text, request)
        in_reasoning = len(self._begins(reasoning))
        if in_reasoning and in_reasoning == len(begins):
            faults.append("A tool call inside the reasoning is not run: end the reasoning first.")
        begins = begins[in_reasoning:]
        if begins and end:
            last, _, rest = text[begins[-1] :].rpartition(end)
            if not last:
                faults.append(f"The last tool call is not closed with {end}")
                text, tail = text[: begins[-1]], text[begins.pop() :]
                content, calls = self._parse(text, request)[1:]
                content += "" if calls else tail
            elif rest := self._without_controls(rest):
                faults.append(f"Text after a tool call is not read: {rest[:_QUOTED]}")
        if len(calls) < len(begins):
            calls = self._piecewise(text, begins, request, faults) or calls
            if not calls and text[begins[0] :] not in content:
                content += text[begins[0] :]
        turn: Turn = {"role": "assistant", "content": content}
        if reasoning:
            turn["reasoning_content"] = reasoning
        read = []
        for index, (sampled, name, arguments) in enumerate(calls):
            if (function := _function(name, arguments)) is None:
                quoted = f"{name!a:.{_QUOTED}}: {arguments!a:.{_QUOTED}}"
                faults.append(f"The arguments of this call are not a JSON object: {quoted}")
                continue
            number = sampled if sampled and sampled in text else f"{digest}{index:02d}"
            read.append({"type": "function", "id": number, "function": function})
        return SampledTurn({**turn, "tool_calls": read} if read else turn, tuple(faults[:_FAULTS]))

    def _begins(self, text: str) -> list[int]:
        if not self.form.begin:
            return []
        return [match.start() for match in re.finditer(self.form.begin, text)]

    def _thinks(self, text: str) -> bool:
        return bool(self._start) and self._start in text

    def _parse(self, text: str, request: Any) -> tuple[str, str, _Calls]:
        """Returns the reasoning, the content and the calls."""
        thinks = self._thinks(text)
        kind = self._thinking if thinks else self._plain
        before = text.partition(self._start)[0] if thinks and self._drops_text_before else ""
        try:
            parser = kind(self._tokenizer, request.tools, **self._options)
            reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True)
            read = [(call.id or "", call.name, call.arguments) for call in calls or ()]
        except Exception:  # noqa: BLE001  (parsers may raise anything for what a model samples)
            return "", text, []
        begins = self._begins(before)
        content = before[: begins[0] if begins else None] + (content or "")
        content = content.strip() if read else content.lstrip("\n" if thinks else "")
        if not reasoning and not content and not read:  # text of no known part
            content = self._without_controls(text)
        return (reasoning or "").strip("\n"), content, read

    def _piecewise(self, text: str, begins: list[int], request: Any, faults: list[str]) -> _Calls:
        """Reads calls one by one, so that a broken one does not hide the others."""
        calls = []
        for start, end in zip(begins, [*begins[1:], len(text)], strict=True):
            piece = text[start:end]
            read = self._parse(piece, request)[2]
            calls += read
            if not read:
                faults.append(f"This tool call cannot be read: {piece.strip()[:_QUOTED]}")
        return calls

    def _without_controls(self, text: str) -> str:
        for token in self._added:
            text = text.replace(token, "")
        return text.strip()


_FAULTS = 8
_QUOTED = 200
"""Characters of a faulty call that are repeated to the model."""

_USER: Turn = {"role": "user", "content": "Hi"}


def _template(tokenizer: Any) -> str:
    return str(tokenizer.get_chat_template(tools=_TOOLS) if tokenizer.chat_template else "")


def _rendered(tokenizer: Any, turns: list[Turn], **options: Any) -> str:
    return render_turns(tokenizer, turns, what="a turn with calls", tools=_TOOLS, **options)


def _function(name: str, arguments: str) -> dict[str, Any] | None:
    """Returns a function that can be stored and rendered; None if they are not an object."""
    try:
        filled = json.loads(arguments)
        json.dumps([name, filled], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return {"name": name, "arguments": filled} if isinstance(filled, dict) else None


@lru_cache(maxsize=64)
def _request(tools: str) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[_USER], tools=json.loads(tools), tool_choice="auto")


def _schema(**types: Any) -> dict[str, Any]:
    kinds = {key: {"type": kind, "description": key} for key, kind in types.items()}
    return {"type": "object", "description": "Values", "properties": kinds, "required": []}


_PLACE = _schema(text="string", count="integer", scale="number", exact="boolean", tags="array")
_PLACE["properties"] |= _schema(until=["string", "null"])["properties"]
_PLACE["properties"]["where"] = _schema(x="integer")
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in (("find_place", _PLACE), ("wait", _schema(seconds="integer")))
]


def _calls(*calls: tuple[str, dict[str, Any]], **keys: str) -> Turn:
    written = [
        {"type": "function", "id": f"call0000{index}", "function": {"name": n, "arguments": a}}
        for index, (n, a) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written, **keys}


_TYPES = {"count": 3, "scale": -0.5, "exact": True, "where": {"x": 1}, "tags": ["a", "b c"]}
_NEEDED = (
    _calls(("wait", {"seconds": 1})),
    _calls(("wait", {"seconds": 1}), ("find_place", {"text": "Rome", "count": 2})),
    _calls(("find_place", {"text": "Rome", **_TYPES})),
)
_WISHED = (
    _calls(("wait", {"seconds": 1}), content="One moment."),
    _calls(("find_place", {"text": "Rome", "until": None})),
    _calls(("find_place", {"text": "Zü \"r'i\nch\\"})),
    _calls(("wait", {"seconds": 1}), reasoning_content="Why?\nYes."),
)


def _is_read(parser: _CallParser, tokenizer: Any, turn: Turn) -> bool | None:
    """Whether a turn is read back as the template writes it; None if it does not write it."""
    reasoning = turn.get("reasoning_content", "")
    aliases = {"reasoning": reasoning, "thinking": reasoning} if reasoning else {}
    try:
        text = _rendered(tokenizer, [_USER, {**turn, **aliases}])
    except DataError:
        return None
    names = [call["function"]["name"] for call in turn["tool_calls"]]
    sampled = text.removeprefix(parser.header).rstrip()
    if not text.startswith(parser.header) or not all(
        part in sampled for part in (reasoning, turn["content"], *names)
    ):
        return None
    ids = tokenizer.encode(sampled, add_special_tokens=False)
    read = parser.read(ids, _TOOLS, has_opening=True)
    if read is None or read.faults:
        return False
    calls = [call["function"] for call in read.turn.get("tool_calls", ())]
    return (
        calls == [call["function"] for call in turn["tool_calls"]]
        and read.turn["content"] == turn["content"]
        and read.turn.get("reasoning_content", "") == reasoning
    )


@lru_cache(maxsize=8)
def _proven(tokenizer: Any, template: str, name: str | None) -> _CallParser:
    """Returns the format's parser that reads most of the turns; `template` is a part of the key."""
    candidates = [form for form in FORMATS if re.search(form.marker, template)]
    if name:
        named = [form for form in FORMATS if form.parser == name]
        candidates = named or [_named(name, candidates)]
    best: tuple[int, _CallParser] | None = None
    tried = []
    for form in candidates:
        tried.append(form.parser)
        try:
            parser = _CallParser(tokenizer, form)
        # A token of the vocabulary or a package is missing.
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            tried[-1] += f" ({error})"
            continue
        needed = [_is_read(parser, tokenizer, turn) for turn in _NEEDED]
        if False in needed or (needed[0] is None and not name):
            continue
        score = sum(_is_read(parser, tokenizer, turn) is True for turn in _WISHED)
        if best is None or score > best[0]:
            best = score, parser
    if best is None:
        raise ConfigError(
            "no parser reads the tool calls that the chat template writes",
            expected="calls that are read back as they were written",
            got=f"tried {', '.join(tried)}" if tried else "a template without known calls",
            fix="set model.tool_parser to a parser of vLLM that reads the model's calls, or "
            "use a model whose chat template writes tool calls",
        )
    return best[1]


def _named(name: str, candidates: Sequence[CallFormat]) -> CallFormat:
    from vllm.tool_parsers import ToolParserManager

    names = sorted(ToolParserManager.list_registered())
    if name not in names:
        raise ConfigError(
            f"model.tool_parser: vLLM has no tool parser {name!r}",
            expected=", ".join(names),
            fix="choose one of these",
        )
    marks = next(((form.begin, form.end) for form in candidates), ("", ""))
    return CallFormat("", name, *marks)
