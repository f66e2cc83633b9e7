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
    """

    marker: str
    parser: str
    begin: str = ""
    end: str = ""
    reasoning: tuple[str, str] | None = None


THINK = ("<think>", "deepseek_r1")
"""Start of reasoning and its parser in most families."""

_XML = ("<tool_call>", "</tool_call>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>", ("<seed:think>", "seed_oss"))
_LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>")
_DEEPSEEK = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
_DSML = ("\uff5cDSML\uff5c", "<\uff5cDSML\uff5cinvoke", "</\uff5cDSML\uff5c")

FORMATS = (
    CallFormat(_DEEPSEEK[0], "deepseek_v3", *_DEEPSEEK),
    CallFormat(_DEEPSEEK[0], "deepseek_v31", *_DEEPSEEK),
    CallFormat(_DSML[0], "deepseek_v32", *_DSML[1:]),
    CallFormat(_DSML[0], "deepseek_v4", *_DSML[1:]),
    CallFormat("<arg_key>", "glm45", *_XML),
    CallFormat("<minimax:tool_call>", "minimax_m2", "<invoke", "</minimax:tool_call>"),
    CallFormat(r"\]<\]minimax\[>\[", "minimax_m3", "<invoke", "</tool_call>"),
    CallFormat("<seed:tool_call>", "seed_oss", *_SEED),
    CallFormat("<longcat_tool_call>", "longcat", *_LONGCAT),
    CallFormat("<function=", "qwen3_coder", *_XML),
    CallFormat("<tool_call>", "hermes", *_XML),
    CallFormat(
        r"<\|tool_call>", "gemma4", r"<\|tool_call>", "<tool_call|>", ("<|channel>", "gemma4")
    ),
    CallFormat("<start_function_call>", "functiongemma", "<start_function_call>"),
    CallFormat(r"<\|tool_call_start\|>", "lfm2", r"<\|tool_call_start\|>", "<|tool_call_end|>"),
    CallFormat(r"<\|tool_call_begin\|>", "kimi_k2", r"<\|tool_call_begin\|>", "<|tool_call_end|>"),
    CallFormat(
        r"<\|START_ACTION\|>",
        "cohere_command3",
        r"<\|START_ACTION\|>",
        "<|END_ACTION|>",
        ("<|START_THINKING|>", "cohere_command3"),
    ),
    CallFormat(
        "<atem:function_calls>",
        "muse_glimmer",
        "<atem:invoke",
        "</atem:function_calls>",
        ("<|message|>", "muse_glimmer"),
    ),
    CallFormat(r"<\|channel\|>analysis", "hf", r"to=functions\.", "", ("<|message|>", "hf")),
    CallFormat(r"\[TOOL_CALLS\]", "mistral", r"\[TOOL_CALLS\]", "", ("[THINK]", "mistral")),
    CallFormat("<function_calls>", "olmo3", "<function_calls>", "</function_calls>"),
    CallFormat("<tool_calls>", "hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
    CallFormat("functools", "phi4_mini_json", r"functools\["),
    CallFormat(r"<\|tool_call\|>", "granite", r"<\|tool_call\|>"),
    CallFormat(r'"parameters": ', "llama3_json", r'^\s*(?:<\|python_tag\|>)?\{\s*"'),
    CallFormat("tool_calls", "pythonic", r"^\s*\[\s*[A-Za-z_][\w.]*\("),
)
"""Formats in the order in which they are tried."""

GPT_OSS: dict[str, Any] = {
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
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
"""Response template of GPT-OSS, whose parser in vLLM downloads a vocabulary."""
