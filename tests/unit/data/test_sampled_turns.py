"""Sampled turns read back under the chat templates of published models.

The templates are those of the installed `trl`; the tokenizers have one token per byte and the
template's special tokens.
"""

import json
import random
import re
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.data.pretrained import load_tokenizer, set_template
from nemo_rl_core.data.sampled_turns import SampledTurn, TurnReader
from nemo_rl_core.errors import ConfigError

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "_training" not in path.stem)

CONTROL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]+[|\uff5c]>|<\|\"\|>|<\|[a-z_]+>|<[a-z_]+\|>|</?(?:think|tool_call|tool_response)>|\[[A-Z_]{4,}\]"
)

PARSERS = {
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "deepseek_v3"),
    "diffusion_gemma": "hf",
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "hf"),
    **dict.fromkeys(("glm4moe", "gptoss"), "hf"),
    **dict.fromkeys(("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"), "lfm2"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama3_json"),
    "muse_glimmer": "muse_glimmer",
    **{f"nemotron_3_{size}": "hf" for size in ("5_lightning", "nano", "super", "ultra")},
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), "hermes"),
    **{f"qwen3_{name}": "hf" for name in ("5_nothink", "5_think", "6", "8")},
}
"""Templates that write calls, and what reads them; other templates write none."""

ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}  # write at most one call per turn
NOT_ESCAPED = {"lfm2_2_5", "lfm2_2_5_v2"}  # write a quote in a text as it is
WITH_REASONING = {
    "diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "gptoss",
    "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "muse_glimmer", "nemotron_3_5_lightning",
    "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_think",
    "qwen3_6", "qwen3_8",
}  # fmt: skip

USER = {"role": "user", "content": "What is on?"}


def schema(**types: str) -> dict[str, Any]:
    kinds = {key: {"type": kind, "description": "x"} for key, kind in types.items()}
    return {"type": "object", "properties": kinds, "required": [*kinds]}


BOOK = schema(title="string", pages="integer", price="number", sold="boolean", tags="array")
BOOK["properties"]["place"] = {**schema(shelf="string", row="integer"), "description": "x"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in (("put_book", BOOK), ("list", schema(limit="integer")))
]
PUT = ("put_book", {
    "title": "Les Misérables 悲惨世界", "pages": 1463, "price": 9.5, "sold": False,
    "tags": ["old", "long one"], "place": {"shelf": "B", "row": 2},
})  # fmt: skip
LIST = ("list", {"limit": 3})
QUOTED = ("put_book", {"title": "She said \"no\",\nand \\ 'left'"})


@lru_cache
def tokenizer_of(name: str, template: str | None = None) -> Any:
    template = (FOLDER / f"{name}.jinja").read_text() if template is None else template
    tokens = {*CONTROL.findall(template), "<think>", "</think>", "<|python_tag|>"}
    core = Tokenizer(
        models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (*sorted(tokens), "<bos>", "<eos>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", chat_template=template or None
    )


def turn(*calls: tuple[str, Any], content: str = "", reasoning: str = "") -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    written = {
        "tool_calls": [{"type": "function", "id": "callabcd0", "function": f} for f in functions]
    }
    keys = ("reasoning_content", "thinking", "reasoning")
    thoughts = dict.fromkeys(keys, reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **(written if calls else {}), **thoughts}


def sampled(name: str, answer: dict[str, Any]) -> list[int]:
    """The tokens that a model samples to write a turn, by the template itself."""
    tokenizer = tokenizer_of(name)
    if name.startswith("deepseek"):
        answer = {**json.loads(json.dumps(answer)), "content": answer["content"] or None}
        for call in answer.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    options = {"tools": TOOLS, "tokenize": False}
    before = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **options)
    text = tokenizer.apply_chat_template([USER, answer], **options)
    if not text.startswith(before):  # reasoning is closed in the same line, or not opened
        before = before.removesuffix("\n")
    if not text.startswith(before):
        before = before.removesuffix("<think>")
        text = f"{before}</think>{text.removeprefix(before)}"
    assert text.startswith(before)
    ids = tokenizer.encode(text.removeprefix(before).rstrip(), add_special_tokens=False)
    return list(ids)


def read(name: str, text: str) -> SampledTurn:
    tokenizer = tokenizer_of(name)
    return TurnReader(tokenizer).read(tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)


def calls_of(result: SampledTurn) -> list[tuple[str, Any]]:
    calls = result.turn.get("tool_calls", ())
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_every_template_that_writes_calls_has_a_parser() -> None:
    chosen = {}
    for name in NAMES:
        try:
            chosen[name] = TurnReader(tokenizer_of(name)).require_calls()
        except ConfigError as error:
            assert "model.tool_parser" in str(error)
    assert chosen == PARSERS


@pytest.mark.parametrize("name", PARSERS)
def test_calls_and_reasoning_are_read_back(name: str) -> None:
    reader = TurnReader(tokenizer_of(name))
    lists = [[PUT], [LIST], [LIST, PUT], [PUT, LIST, LIST], [QUOTED]]
    for calls in lists:
        if (len(calls) > 1 and name in ONE_CALL) or (calls == [QUOTED] and name in NOT_ESCAPED):
            continue
        result = reader.read(sampled(name, turn(*calls)), tools=TOOLS)
        assert (calls_of(result), result.faults) == (calls, ())
        assert result.turn["content"] == ""
    if name in WITH_REASONING:
        result = reader.read(sampled(name, turn(LIST, reasoning="Why?\n\nSo.")), tools=TOOLS)
        assert (calls_of(result), result.faults) == ([LIST], ())
        assert result.turn["reasoning_content"] == "Why?\n\nSo."
    result = reader.read(sampled(name, turn(content="It is\n\nlate.")), tools=TOOLS)
    assert result == SampledTurn({"role": "assistant", "content": "It is\n\nlate."})


JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
KEYS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
# Of families whose templates `trl` does not have: before the calls, a call, between, after.
OTHERS = {
    "mistral": ("[TOOL_CALLS] [", JSON.replace("}}}", '}}, "id": "{{ c.id }}"}'), ", ", "]"),
    "mistral_11": (
        "",
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
        "",
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>{{ '\\n' }}",
        '<invoke name="{{ c.function.name }}">\n'
        f'{KEYS}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n',
        "",
        "</minimax:tool_call>",
    ),
    "seed_oss": (
        "",
        "<seed:tool_call>\n<function={{ c.function.name }}>\n"
        f"{KEYS}<parameter={{{{ k }}}}>{VALUE}</parameter>\n{{% endfor %}}"
        "</function>\n</seed:tool_call>",
        "",
        "",
    ),
    "deepseek_v31": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>{{ c.function.name }}<\uff5ctool\u2581sep\uff5c>"
        "{{ c.function.arguments | tojson }}<\uff5ctool\u2581call\u2581end\uff5c>",
        "",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    "olmo3": (
        "<function_calls>",
        "{{ c.function.name }}("
        f"{KEYS}{{{{ k }}}}={{{{ v | tojson }}}}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        "{{ '\\n' }}",
        "</function_calls>",
    ),
    "phi4_mini": ("functools[", JSON, ", ", "]"),
    "cohere": (
        "<|START_ACTION|>[\n",
        JSON.replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"'),
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "granite": ("<|tool_call|>[", JSON, ", ", "]"),
    "longcat": ("", f"<longcat_tool_call>\n{JSON}\n</longcat_tool_call>", "", ""),
    "hunyuan": ("<tool_calls>[", JSON, ", ", "]</tool_calls>"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_of_other_families_are_read_back(name: str) -> None:
    before, call, between, after = OTHERS[name]
    written = (
        f"{before}{{% for c in m.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}"
        f"{{% endfor %}}{after}"
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% if m.tool_calls %}}{written}{{% endif %}}<|im_end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tokenizer_of(name, template)
    TurnReader(tokenizer).require_calls()
    turns = [USER, turn(LIST, PUT)]
    text = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("assistant\n")[2]
    ids = tokenizer.encode(text, add_special_tokens=False)
    result = TurnReader(tokenizer).read(ids, tools=TOOLS)
    assert (calls_of(result), result.faults) == ([LIST, PUT], ())


def test_plain_text_stays_as_it_is() -> None:
    plain, text = tokenizer_of("", ""), ' {"name": "list"} <tool_call>\n'
    ids = plain.encode(text, add_special_tokens=False)
    expected = SampledTurn({"role": "assistant", "content": text})
    assert TurnReader(plain).read([*ids, plain.eos_token_id], tools=TOOLS) == expected
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer.encode(f"<think>{text}", add_special_tokens=False)
    content = tokenizer.decode(ids, skip_special_tokens=True)
    assert TurnReader(tokenizer).read(ids).turn == {"role": "assistant", "content": content}
    assert read("qwen3", " Done.\n").turn == {"role": "assistant", "content": " Done.\n"}


def test_reasoning_that_the_prompt_opens_begins_the_turn() -> None:
    call = f"<tool_call>\n<function=list>\n{LIMIT}\n</parameter>\n</function>\n</tool_call>"
    result = read("qwen3_6", f"So.\n</think>\n\nI look.\n\n{call}<|im_end|>")
    assert (result.turn["reasoning_content"], result.turn["content"]) == ("So.", "I look.")
    assert (calls_of(result), result.faults) == ([LIST], ())
    cut = read("qwen3_6", "So")
    assert cut.turn == {"role": "assistant", "content": "", "reasoning_content": "So"}
    # Without thinking, the prompt closes it.
    result = read("qwen3_5_nothink", f"I look.\n\n{call}<|im_end|>")
    assert (result.turn["content"], calls_of(result)) == ("I look.", [LIST])
    assert "reasoning_content" not in result.turn


LIMIT = "<parameter=limit>\n3"
CHANNELS = "<|channel|>commentary to=functions.list <|constrain|>json<|message|>"
HERMES = '<tool_call>\n{"name": "list", "arguments": {"limit": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "calls", "fault"),
    [
        ("qwen3", HERMES.replace("3}}", "3}"), [], "cannot be read: <tool_call>"),
        ("qwen3", HERMES.replace('"name"', '"tool"'), [], "cannot be read"),
        ("qwen3", HERMES.replace('{"limit": 3}', "[3]"), [], "not a JSON object: 'list': '[3]'"),
        ("qwen3", HERMES.replace("3", "NaN"), [], "not a JSON object"),
        ("qwen3", HERMES.replace("3", '"\\ud800"'), [], "not a JSON object"),
        ("qwen3", HERMES.removesuffix("</tool_call>"), [], "not closed with </tool_call>"),
        ("qwen3", f"{HERMES}\n{HERMES[:30]}", [LIST], "not closed with </tool_call>"),
        ("qwen3", f"{HERMES.replace('}}', '}')}\n{HERMES}", [LIST], "cannot be read"),
        ("qwen3", f"{HERMES}\n{HERMES.replace('}}', '}')}", [LIST], "cannot be read"),
        ("qwen3", f"{HERMES} I wait.", [LIST], "Text after a tool call is not read: I wait."),
        ("qwen3", f"<think>\n{HERMES}", [], "inside the reasoning"),
        ("qwen3", f"<think>\n{HERMES}\n</think>\n\nNo.", [], "inside the reasoning"),
        ("qwen3", f"<think>\n{HERMES}\n</think>\n\n{HERMES}", [LIST], None),
        ("qwen3_6", f"</think>{HERMES}", [], "cannot be read"),
        (
            "qwen3_6",
            f"</think><tool_call>\n<function=list>\n{LIMIT}\n</function>\n</tool_call>",
            [],
            "cannot be read",
        ),
        (
            "glm4moe",
            "<tool_call>list\n<arg_key>limit</arg_key>\n</tool_call>",
            [],
            "cannot be read",
        ),
        ("gemma4_v5", "<|tool_call>call:list{limit:}<tool_call|>", [], "cannot be read"),
        ("lfm2_v2", "<|tool_call_start|>[list(limit=]<|tool_call_end|>", [], "cannot be read"),
        ("llama3_1", '{"name": "list", "parameters": {"limit": 3}', [], "cannot be read"),
        (
            "gptoss",
            f'{CHANNELS}{{"limit": 3}}<|call|>',
            [LIST],
            None,
        ),
        ("gptoss", ' to=functions.list<|channel|>commentary json<|message|>{"limit"', [], "cannot"),
    ],
)
def test_what_cannot_be_read_is_a_fault(
    name: str, text: str, calls: list[Any], fault: str | None
) -> None:
    result = read(name, text)
    assert calls_of(result) == calls
    assert len(result.faults) == (fault is not None)
    assert (fault or "") in "".join(result.faults)


def test_a_call_that_cannot_be_read_stays_in_the_content() -> None:
    broken = HERMES.replace("}}", "}")
    assert read("qwen3", f"I look.\n{broken}").turn["content"] == f"I look.\n{broken}"
    assert read("qwen3", f"I look.\n{HERMES[:40]}").turn["content"] == f"I look.\n{HERMES[:40]}"


def test_text_before_the_reasoning_or_outside_known_parts_is_kept() -> None:
    result = read("qwen3", f"First. <think>\nSo.\n</think>\n\n{HERMES}")
    assert (result.turn["content"], result.turn["reasoning_content"]) == ("First.", "So.")
    assert calls_of(result) == [LIST]
    assert read("gptoss", "<|channel|>other<|message|>Text").turn["content"] == "otherText"
    python = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    (fault,) = read("gptoss", f"{CHANNELS.partition(' ')[0]}<|message|>Hm.<|end|>{python}").faults
    assert fault.startswith("This tool call cannot be read: to=python code")


def test_ids_of_calls_depend_on_the_tokens_alone() -> None:
    first, again, other = (
        [call["id"] for call in read("qwen3", text).turn["tool_calls"]]
        for text in (f"{HERMES}\n{HERMES}", f"{HERMES}\n{HERMES}", f"{HERMES}\n\n{HERMES}")
    )
    assert first == again
    assert len({*first, *other}) == 4
    assert all(re.fullmatch("[0-9a-f]{9}", number) for number in first)  # Mistral's form


def test_cut_and_damaged_turns_are_read_without_an_exception() -> None:
    draw = random.Random(0)
    for name in ("qwen3", "qwen3_6", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "deepseekv3"):
        reader, tokenizer = TurnReader(tokenizer_of(name)), tokenizer_of(name)
        calls = [PUT] if name in ONE_CALL else [LIST, PUT]
        ids = sampled(name, turn(*calls, reasoning="Why?"))
        begins = tokenizer.decode(ids).find("list" if len(calls) > 1 else "put_book")
        for end in draw.sample(range(len(ids)), 150):
            result = reader.read(ids[:end], tools=TOOLS)
            read_calls = calls_of(result)
            assert read_calls == calls[: len(read_calls)]
            is_cut = begins < len(tokenizer.decode(ids[:end])) and len(read_calls) < len(calls)
            assert not is_cut or read_calls or result.faults
        for _ in range(150):
            start = draw.randrange(len(ids))
            piece = draw.choices(ids, k=draw.randrange(8))
            damaged = [*ids[:start], *piece, *ids[start + draw.randrange(8) :]]
            assert isinstance(reader.read(damaged, tools=TOOLS), SampledTurn)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4_v5", "<|tool_call>call:list" + "{a:" * 2000),
        ("glm4moe", "<tool_call>list\n" + "<arg_key>a</arg_key>\n<arg_value>" * 300),
        ("qwen3_6", "</think><tool_call>\n<function=list>\n<parameter=a>\n" + "<b>{1}</b>\n" * 900),
    ],
)
def test_the_time_to_read_is_linear(name: str, text: str) -> None:
    def seconds(times: int) -> float:
        start = time.process_time()
        read(name, text * times)
        return time.process_time() - start

    seconds(1)
    assert seconds(4) < 12 * max(seconds(1), 0.002)


def test_a_parser_is_chosen_by_name(tmp_path: Path) -> None:
    def reader(template: str, parser: str) -> TurnReader:
        tokenizer = tokenizer_of(template)
        set_template(tokenizer, PretrainedModel(name="m", tool_parser=parser))
        tokenizer.save_pretrained(tmp_path)
        return TurnReader(load_tokenizer(tmp_path))

    assert reader("qwen3", "granite4").require_calls() == "granite4"
    with pytest.raises(ConfigError, match=r"got: tried lfm2 \(LFM2 tool parser could not locate"):
        reader("qwen3", "lfm2").require_calls()
    with pytest.raises(ConfigError, match="has no tool parser 'hermies'"):
        reader("qwen3", "hermies").require_calls()
    # A template that writes no calls proves nothing: the parser is the user's choice.
    ids = tokenizer_of("phi3").encode(HERMES, add_special_tokens=False)
    assert calls_of(reader("phi3", "hermes").read(ids, tools=TOOLS)) == [LIST]


@pytest.mark.slow
def test_without_tools_no_parser_is_imported() -> None:
    code = (
        "import sys; from nemo_rl_core.data.sampled_turns import TurnReader; "
        "from nemo_rl_core.data.tokenizer import build_byte_tokenizer; "
        "TurnReader(build_byte_tokenizer()).read([5, 2]); sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
