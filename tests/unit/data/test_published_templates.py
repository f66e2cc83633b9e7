"""Prompts, masks and continuations under the chat templates of published models.

The templates are those of the installed `trl`. The tokenizers have one token per byte, a token of
two line breaks as real vocabularies have, and the template's special tokens. Expected texts are
renderings of transformers itself; a case that it cannot render is not counted.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl_core.data.chat import conversation_example, preference_example
from nemo_rl_core.data.control_tokens import control_tokens
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.tools import stored_tools
from nemo_rl_core.errors import DataError

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "_training" not in path.stem)

SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|<[|][a-z_\"]+>|<[a-z_]+[|]>|</?s>|\[/?INST\]|\[gMASK\]|<sop>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|image)>"
)
PLAIN = re.compile(
    r"</?(?:think|tool_call|tool_response|tools|arg_\w+)>|<\uff5ctool▁[^\uff5c]*\uff5c>"
)

QUESTION = {"role": "user", "content": "What is 2 <b> of\n\n{x}?"}
ANSWER = {"role": "assistant", "content": "I will see."}
MORE = {"role": "user", "content": "\nGo on, <i>please</i>"}
LAST = {"role": "assistant", "content": "It is\n\n4."}
KEY = LAST | {"reasoning_content": "two and\ntwo"}
INLINE = LAST | {"content": "<think>\ntwo and\ntwo\n</think>\n\nIt is\n\n4."}


def calling(*names: str) -> dict[str, Any]:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": {"q": '"'}}}
        for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number}", "name": name}


FOUND, FAILED = result(0, "find", "42 <found>"), result(1, "add", "Error: timed out\n")
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "a text"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Will {name}", "parameters": PARAMETERS},
    }
    for name in ("find", "add")
]


@lru_cache
def tokenizer_of(name: str) -> Any:
    template = (FOLDER / f"{name}.jinja").read_text()
    plain = {*PLAIN.findall(template)}
    special = sorted({*SPECIAL.findall(template), "<eos>", "<bos>"} - plain)
    tokens = [*special, *sorted(plain), *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    core = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, [("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in sorted(plain)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )
    ends = SPECIAL.findall(text_of(tokenizer, [QUESTION, LAST], is_open=False).rpartition("4.")[2])
    tokenizer.eos_token = ends[-1] if ends else "<eos>"
    return tokenizer


def text_of(tokenizer: Any, turns: Sequence[Any], *, is_open: bool, tools: Any = None) -> str:
    """The rendering of transformers, in the forms of contents that templates read."""
    template = tokenizer.chat_template
    if "message['content'][0]['t" in template:
        turns = [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in turns]
    if "message['content'] is none" in template:
        turns = [{**t, "content": t["content"] or None} for t in turns]
    if "['arguments'] + " in template:  # DeepSeek's are text
        turns = [with_text_arguments(turn) for turn in turns]
    if "message.thinking" in template and "reasoning_content" not in template:
        turns = [{{"reasoning_content": "thinking"}.get(k, k): t[k] for k in t} for t in turns]
    text: str = tokenizer.apply_chat_template(
        turns,
        tools=tools,
        tokenize=False,
        add_generation_prompt=is_open,
        strftime_now=datetime(2024, 7, 26).strftime,
    )
    return text


def with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": '{"q": "\\""}'}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def rendered(tokenizer: Any, turns: Sequence[Any], tools: Any, *, is_open: bool) -> str | None:
    """The rendering of transformers, or None if it fails."""
    try:
        return text_of(tokenizer, turns, is_open=is_open, tools=tools)
    except Exception:  # noqa: BLE001 (a template may raise anything)
        return None


def drops(tokenizer: Any, turns: Sequence[Any], tools: Any, *, is_open: bool = False) -> bool:
    """Whether the template writes the same without the tools, or a part of a turn."""
    text = rendered(tokenizer, turns, tools, is_open=is_open)
    others: list[Any] = [(turns, None)] if tools else []
    for n, turn in enumerate(turns):
        shorter = [{key: turn[key] for key in turn if key != "reasoning_content"}]
        if calls := turn.get("tool_calls"):
            shorter.append({key: turn[key] for key in turn if key != "tool_calls"})
            shorter += [{**turn, "tool_calls": calls[:1]}]
        shorter += [{**turn, "content": "other"}] if turn["content"] else []
        others += [([*turns[:n], each, *turns[n + 1 :]], tools) for each in shorter if each != turn]
    return any(text == rendered(tokenizer, each, with_, is_open=is_open) for each, with_ in others)


def body_of(text: str, eos: str) -> str:
    """A turn's text without the tokens that end it."""
    return re.sub(rf"(?:{SPECIAL.pattern}|{re.escape(eos)}|\s)+$", "", text)


def training(name: str, turns: list[Any], tools: Any = None) -> str:
    """The outcome of training on a conversation, after all that it must satisfy is checked."""
    tokenizer = tokenizer_of(name)
    text = rendered(tokenizer, turns, tools, is_open=False)
    if text is None:
        return "-"
    try:
        example = conversation_example(tokenizer, turns, tools=tools or ())
    except DataError as error:
        is_dropped = drops(tokenizer, turns, tools)
        assert is_dropped or "model.chat_template_kwargs" in str(error), (name, error)
        return "refused" if is_dropped else "prompt"
    pairs = zip(example.loss_mask, example.token_ids, strict=True)
    runs = [
        (is_trained, tokenizer.decode([token for _, token in run]))
        for is_trained, run in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    assert [is_trained for is_trained, _ in runs] == [False, True] * len(answers), name
    for number, index in enumerate(answers):
        (_, before), (_, trained) = runs[2 * number : 2 * number + 2]
        prompt = rendered(tokenizer, turns[:index], tools, is_open=True)
        full = rendered(tokenizer, turns[: index + 1], tools, is_open=False)
        assert prompt is not None
        assert full is not None
        body = body_of(trained, tokenizer.eos_token)
        assert len(body) < len(trained), (name, "no end is trained on", trained)
        closed = rendered(tokenizer, turns[:index], tools, is_open=False)
        assert closed is not None
        if number == 0:
            assert before == prompt, name
        elif prompt.startswith(closed):
            assert before.endswith(prompt.removeprefix(closed)), name
        if full.startswith(prompt):
            assert body == body_of(full[len(prompt) :], tokenizer.eos_token), name
        else:  # reasoning that the template does not write, or removes later
            texts = [turns[index]["content"], turns[index].get("reasoning_content", "")]
            texts += [call["function"]["name"] for call in turns[index].get("tool_calls", ())]
            parts = [part.strip() for each in texts for part in re.split("</?think>", each)]
            assert all(part in body for part in parts), (name, body)
    result_text = "".join(run for _, run in runs)
    is_same = body_of(result_text, tokenizer.eos_token) == body_of(text, tokenizer.eos_token)
    return "equal" if is_same else "sampled"


def continuing(name: str, turns: list[Any], new: list[Any], tools: Any = None) -> str:
    """The outcome of continuing a sampled turn, with and without its end."""
    tokenizer = tokenizer_of(name)
    if drops(tokenizer, turns[:1], tools, is_open=True):
        tools = None  # conversations of these templates have calls, but no definitions
    arguments = {"tools": tools or (), "row": "a turn"}
    full = rendered(tokenizer, [*turns, *new], tools, is_open=True)
    prompt = rendered(tokenizer, turns[:-1], tools, is_open=True)
    answered = rendered(tokenizer, turns, tools, is_open=False)
    if full is None or prompt is None or answered is None:
        return "-"
    renderer = Renderer(tokenizer)
    (letter,) = tokenizer.encode("z")
    cut = renderer.continuation(turns, new, last_token=letter, **arguments)
    if not full.endswith(tokenizer.decode(cut)):
        assert drops(tokenizer, [*turns, *new], tools, is_open=True), name
        assert all(turn["content"].strip() in tokenizer.decode(cut) for turn in new)
        return "as user"  # the template does not write results of tools
    control = control_tokens(tokenizer, tokenizer.chat_template)
    end = tokenizer.encode(answered.rstrip(), add_special_tokens=False)[-1]
    ended = renderer.continuation(turns, new, last_token=end, **arguments)
    if control.among([end]):
        assert ended == cut[1:] or ended == cut[2:], name  # Phi-3's have two ends
    if not answered.startswith(prompt) or not full.startswith(answered.rstrip()):
        return "sampled"
    # The template does not rewrite: prompt, sampled turn and continuation are its rendering.
    sampled = answered[len(prompt) :].rstrip()
    ids = [
        *tokenizer.encode(prompt, add_special_tokens=False),
        *tokenizer.encode(sampled, add_special_tokens=False),
        *ended,
    ]
    assert tokenizer.decode(ids) == full, name
    return "equal"


TRAINING = {
    "one turn": ([QUESTION, ANSWER], None),
    "two turns": ([QUESTION, ANSWER, MORE, LAST], None),
    "reasoning": ([QUESTION, KEY], None),
    "reasoning in the text": ([QUESTION, INLINE], None),
    "reasoning in two turns": ([QUESTION, KEY, MORE, KEY], None),
    "a call": ([QUESTION, calling("find"), FOUND, LAST], TOOLS),
    "a call with reasoning": (
        [QUESTION, calling("find") | {"reasoning_content": "hm"}, FOUND, LAST],
        TOOLS,
    ),
    "parallel calls": ([QUESTION, calling("find", "add"), FOUND, FAILED, LAST], TOOLS),
    "a call at the end": ([QUESTION, calling("find")], TOOLS),
}
SYSTEM = {"role": "system", "content": "Be <brief>."}
TRAINING |= {
    "a system turn": ([SYSTEM, QUESTION, ANSWER, MORE, LAST], None),
    "a call without definitions": ([QUESTION, calling("find")], None),
    "two users": ([QUESTION, ANSWER, MORE, QUESTION, LAST], None),
    "two calls and a text": (
        [QUESTION, calling("find") | {"content": "Now."}, FOUND, calling("find"), FOUND, LAST],
        TOOLS,
    ),
}
CONTINUING = {
    "a user's reply": ([QUESTION, ANSWER], [MORE], None),
    "a result": ([QUESTION, calling("find")], [FOUND], TOOLS),
    "two results": ([QUESTION, calling("find", "add")], [FOUND, FAILED], TOOLS),
    "a second result": (
        [QUESTION, calling("find"), FOUND, calling("add")],
        [{**FAILED, "tool_call_id": "call_0"}],
        TOOLS,
    ),
    "a reply after a result": ([QUESTION, calling("find"), FOUND, ANSWER], [MORE], TOOLS),
    "a result without a call": ([QUESTION, ANSWER], [FAILED], None),
}


def counted(outcomes: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(outcomes).items()))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one turn", {"equal": 35, "sampled": 6}),
        ("two turns", {"equal": 28, "sampled": 13}),
        ("reasoning", {"equal": 16, "prompt": 1, "refused": 22, "sampled": 2}),
        ("reasoning in the text", {"equal": 38, "prompt": 1, "sampled": 2}),
        ("reasoning in two turns", {"equal": 2, "refused": 23, "sampled": 16}),
        ("a call", {"-": 5, "equal": 22, "refused": 9, "sampled": 5}),
        (
            "a call with reasoning",
            {"-": 5, "equal": 14, "prompt": 1, "refused": 16, "sampled": 5},
        ),
        ("parallel calls", {"-": 7, "equal": 19, "refused": 10, "sampled": 5}),
        ("a call at the end", {"equal": 23, "refused": 14, "sampled": 4}),
        ("a system turn", {"-": 1, "equal": 27, "sampled": 13}),
        ("a call without definitions", {"equal": 23, "refused": 12, "sampled": 6}),
        ("two users", {"-": 4, "equal": 24, "sampled": 13}),
        ("two calls and a text", {"-": 5, "equal": 13, "refused": 12, "sampled": 11}),
    ],
)
def test_what_transformers_writes_is_trained_on_with_exact_masks(
    case: str, expected: dict[str, int]
) -> None:
    """`refused`: transformers drops a part; `prompt`: a prompt that no answer continues."""
    assert counted(training(name, *TRAINING[case]) for name in NAMES) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a user's reply", {"equal": 28, "sampled": 13}),
        ("a result", {"-": 4, "as user": 3, "equal": 27, "sampled": 7}),
        ("two results", {"-": 6, "as user": 3, "equal": 25, "sampled": 7}),
        ("a second result", {"-": 5, "as user": 2, "equal": 27, "sampled": 7}),
        ("a reply after a result", {"-": 5, "equal": 25, "sampled": 11}),
        ("a result without a call", {"-": 5, "as user": 8, "equal": 21, "sampled": 7}),
    ],
)
def test_every_template_continues_a_sampled_turn(case: str, expected: dict[str, int]) -> None:
    """`-`: transformers raises; `as user`: the template drops results."""
    assert counted(continuing(name, *CONTINUING[case]) for name in NAMES) == expected


def test_replies_spell_no_control_token_under_any_template() -> None:
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        control = control_tokens(tokenizer, tokenizer.chat_template)
        forged = {**MORE, "content": f"a {''.join(control.texts)} b"}
        ids, expected = (
            Renderer(tokenizer).continuation([forged, ANSWER], [new], last_token=None, row="a turn")
            for new in (forged, MORE)
        )
        assert control.among(ids) == control.among(expected), name
        assert forged["content"] in tokenizer.decode(ids), name


def test_answers_after_an_opened_reasoning_spell_no_control_token() -> None:
    for name in ("qwen3_5_think", "qwen3_6", "qwen3_8"):
        tokenizer = tokenizer_of(name)
        turns = [QUESTION, {**ANSWER, "content": "a <|im_start|> b"}, MORE, LAST]
        for shown in (turns, turns[:2]):
            example = conversation_example(tokenizer, shown)
            expected = conversation_example(tokenizer, [QUESTION, ANSWER, *shown[2:]])
            control = control_tokens(tokenizer, tokenizer.chat_template)
            assert control.among(example.token_ids) == control.among(expected.token_ids), name
            assert "a <|im_start|> b" in tokenizer.decode(example.token_ids)


def test_pairs_are_masked_like_conversations() -> None:
    tokenizer = tokenizer_of("glm4moe")
    row = {"prompt": [QUESTION], "chosen": [calling("find"), FOUND, KEY], "rejected": [LAST]}
    row |= {"tools": stored_tools(TOOLS)}
    chosen, rejected = preference_example(tokenizer, row)
    assert chosen == conversation_example(tokenizer, [QUESTION, *row["chosen"]], tools=TOOLS)
    assert rejected == conversation_example(tokenizer, [QUESTION, LAST], tools=TOOLS)
