"""How model families write tool calls, and which parsers of vLLM read them."""

from typing import Any, NamedTuple


class CallFormat(NamedTuple):
    """A way to write tool calls.

    Attributes:
        marker: Pattern in chat templates of the format.
        parser: Name of the tool parser in vLLM; `hf` reads by a response template.
        begin: Pattern of the start of a call, or of a list of calls. Empty if unknown.
        end: Text after a call or a list of calls. Empty if the call ends with its JSON.
        reasoning: Start of reasoning and the parser that reads it, if it is not `<think>`.
        template: Response template of transformers; only for the parser `hf`.
    """

    marker: str
    parser: str
    begin: str = ""
    end: str = ""
    reasoning: tuple[str, str] | None = None
    template: dict[str, Any] | None = None


THINK = ("<think>", "deepseek_r1")
"""Start of reasoning and its parser in most families."""

_TAGGED = ("<think>", "hf")
_XML = ("<tool_call>", "</tool_call>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
_LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>")
_DEEPSEEK = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CALL = {"repeats": True, "transform": _FUNCTION}


def _tagged(
    begin: str, end: str, name: str, tag: str, rest: str = "", think: str = "think"
) -> dict[str, Any]:
    """Response template of calls with an argument per tag and nothing else."""
    value = r"(?:(?!</?(?:parameter|arg_))[\s\S])*"
    tags = tag.replace("?P<key>", "?:").format(value)
    call = {
        "open_pattern": rf"{begin}\s*{name}(?=(?:\s*{tags})*\s*{rest}{end})",
        "close": end,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag.format(r"\n?(?P<value>.*?)\n?")},
        **_CALL,
    }
    thinking = {"open": f"<{think}>", "close": f"</{think}>"}
    fields = {"thinking": thinking, "content": {}, "tool_calls": call}
    return {"start_anchor": "<think>", "fields": fields}


_FUNCTION_TAGS = (
    r"<function=(?P<name>[^>\n]+)>",
    r"<parameter=(?P<key>[^>\n]+)>{}</parameter>",
    r"</function>\s*",
)
_ARGUMENT_TAGS = (
    r"(?P<name>[^<\s]+)",
    r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>{}</arg_value>",
)

_GEMMA4: dict[str, Any] = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            **_CALL,
        },
    },
}
"""For Gemma 4, whose parser in vLLM takes cubic time for nested objects."""

_GPT_OSS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
            "close_pattern": r"<\|(?:end|return)\|>",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>\w+)? ?to=functions\.(?P<name>[\w.-]+)"
            r" ?(?:<\|channel\|>\w+)? ?(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            **_CALL,
        },
    },
}
"""For GPT-OSS, whose parser in vLLM downloads a vocabulary."""


def _listed(field: dict[str, str], name: str, arguments: str, **fields: Any) -> dict[str, Any]:
    """Response template of calls in one JSON list."""
    function = {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}
    transform = {"type": "function", "function": function}
    call = {**field, "content": "json", "transform": transform, "transform_each": True}
    return {"start_anchor": "<|assistant|>", "fields": {**fields, "tool_calls": call}}


_PHI4 = _listed({"open_pattern": r"functools(?=\[)"}, "name", "arguments", content={})
"""For Phi-4-mini, whose parser in vLLM reads no lists in arguments."""

_COHERE = _listed(
    {"open": "<|START_ACTION|>", "close": "<|END_ACTION|>"},
    *("tool_name", "parameters"),
    thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
)
"""For Cohere's, whose parser in vLLM needs another package."""

FORMATS = (
    CallFormat(_DEEPSEEK[0], "deepseek_v3", *_DEEPSEEK),
    CallFormat(_DEEPSEEK[0], "deepseek_v31", *_DEEPSEEK),
    CallFormat("<arg_key>", "hf", *_XML, _TAGGED, _tagged(*_XML, *_ARGUMENT_TAGS)),
    CallFormat("<minimax:tool_call>", "minimax_m2", "<invoke", "</minimax:tool_call>"),
    CallFormat(r"\]<\]minimax\[>\[", "minimax_m3", "<invoke", "</tool_call>"),
    CallFormat(
        *("<seed:tool_call>", "hf", *_SEED, ("<seed:think>", "hf")),
        _tagged(*_SEED, *_FUNCTION_TAGS, think="seed:think"),
    ),
    CallFormat("<longcat_tool_call>", "longcat", *_LONGCAT),
    CallFormat(
        *("<function=", "hf", r"<tool_call>(?:\s*<function=)?|<function=", _XML[1], _TAGGED),
        _tagged(*_XML, *_FUNCTION_TAGS),
    ),
    CallFormat("<tool_call>", "hermes", *_XML),
    CallFormat(
        r"<\|tool_call>", "hf", r"<\|tool_call>", "<tool_call|>", ("<|channel>", "hf"), _GEMMA4
    ),
    CallFormat("<start_function_call>", "functiongemma", "<start_function_call>"),
    CallFormat(r"<\|tool_call_start\|>", "lfm2", r"<\|tool_call_start\|>", "<|tool_call_end|>"),
    CallFormat(r"<\|tool_call_begin\|>", "kimi_k2", r"<\|tool_call_begin\|>", "<|tool_call_end|>"),
    CallFormat(
        *(r"<\|START_ACTION\|>", "hf", r"<\|START_ACTION\|>", "<|END_ACTION|>"),
        *(("<|START_THINKING|>", "hf"), _COHERE),
    ),
    CallFormat(
        "<atem:function_calls>",
        "muse_glimmer",
        "<atem:invoke",
        "</atem:function_calls>",
        ("<|message|>", "muse_glimmer"),
    ),
    CallFormat(
        *(r"<\|channel\|>analysis", "hf", r"to=(?:functions\.|\w[^<\n]*<\|)", ""),
        *(("<|message|>", "hf"), _GPT_OSS),
    ),
    CallFormat(r"\[TOOL_CALLS\]", "mistral", r"\[TOOL_CALLS\]", "", ("[THINK]", "mistral")),
    CallFormat("<function_calls>", "olmo3", "<function_calls>", "</function_calls>"),
    CallFormat("<tool_calls>", "hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
    CallFormat("functools", "hf", r"functools\[", "", ("<think>", "hf"), _PHI4),
    CallFormat(r"<\|tool_call\|>", "granite", r"<\|tool_call\|>"),
    CallFormat(r'"parameters": ', "llama3_json", r'^\s*(?:<\|python_tag\|>)?\{\s*"'),
    CallFormat("tool_calls", "pythonic", r"^\s*\[\s*[A-Za-z_][\w.]*\("),
)
"""Formats in the order in which they are tried."""
