"""Masks and continuations of random conversations, under every chat template of `trl`.

Every text has words that no other text has, so the trained words must be those of the trained
turns. Expected texts are renderings of transformers, where a template does not rewrite past turns.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_core.data.chat import conversation_example
from nemo_rl_core.data.control_tokens import control_tokens
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.turns import Turn, is_trained
from nemo_rl_core.errors import DataError
from tests.unit.data.test_published_templates import (
    NAMES,
    TOOLS,
    body_of,
    drops,
    rendered,
    tokenizer_of,
)

SPACE = ["", "", " ", "\n", "\n\n", "\t"]
BETWEEN = [" ", "\n", "\n\n", " <b> ", '"k": 1', "é𝄞", "{{ y }}", "\\n", "'s [1, 2]"]


def conversation(draw: random.Random) -> list[Turn]:
    number, thinks = itertools.count(), draw.random() < 0.3

    def text() -> str:
        words = [f"w{next(number)}q" for _ in range(draw.randrange(1, 4))]
        core = words[0] + "".join(draw.choice(BETWEEN) + word for word in words[1:])
        return draw.choice(SPACE) + core + draw.choice(SPACE)

    def answer() -> Turn:
        reasoning = {"reasoning_content": text()} if thinks and draw.random() < 0.5 else {}
        flag = {"train": False} if draw.random() < 0.2 else {}
        return {"role": "assistant", "content": text(), **reasoning, **flag}

    turns = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
    for _ in range(draw.randrange(1, 4)):
        turns.append({"role": "user", "content": text()})
        while draw.random() < 0.4:
            names = draw.choices(["find", "add"], k=draw.randrange(1, 3))
            calls = [
                {"id": f"call{n:05}", "function": {"name": name, "arguments": {"q": text()}}}
                for n, name in enumerate(names)
            ]
            calls = [{"type": "function", **call} for call in calls]
            turns.append({**answer(), "tool_calls": calls})
            turns[-1]["content"] = draw.choice(["", text()])
            turns += [
                {"role": "tool", "content": text(), "tool_call_id": call["id"], "name": name}
                for call, name in zip(calls, names, strict=True)
            ]
        turns.append(answer())
    return turns


def words(value: Any) -> set[str]:
    return set(re.findall(r"w\d+q", value if isinstance(value, str) else json.dumps(value)))


def num_shared_turns(tokenizer: Any, turns: list[Turn], tools: Any) -> int:
    """Number of turns from the start that the template writes as in the complete conversation."""
    text = rendered(tokenizer, turns, tools, is_open=False)
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            prompt = rendered(tokenizer, turns[:index], tools, is_open=True)
            full = rendered(tokenizer, turns[: index + 1], tools, is_open=False)
            if text is None or prompt is None or full is None:
                return 0
            if not (full.startswith(prompt) and text.startswith(full.rstrip())):
                return index
    return len(turns)


def trained(name: str, turns: list[Turn]) -> str:
    tokenizer = tokenizer_of(name)
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    chosen = [turn for turn in turns if is_trained(turn)]
    if not chosen:
        return "no answer"
    try:
        example = conversation_example(tokenizer, turns, tools=tools or ())
    except DataError as error:
        text = rendered(tokenizer, turns, tools, is_open=False)
        is_fixed = "model.chat_template_kwargs" in str(error)
        assert text is None or is_fixed or drops(tokenizer, turns, tools), (name, error)
        return "refused"
    runs = [
        tokenizer.decode([token for _, token in run])
        for is_answer, run in itertools.groupby(
            zip(example.loss_mask, example.token_ids, strict=True), key=lambda pair: pair[0]
        )
        if is_answer
    ]
    assert [words(run) for run in runs] == [words(turn) for turn in chosen], name
    ends = control_tokens(tokenizer, tokenizer.chat_template).texts
    assert all(run.endswith((*ends, tokenizer.eos_token)) for run in runs), name
    if num_shared_turns(tokenizer, turns, tools) < len(turns):
        return "sampled"
    expected = rendered(tokenizer, turns, tools, is_open=False)
    assert expected is not None
    eos, text = tokenizer.eos_token, tokenizer.decode(example.token_ids)
    assert body_of(text, eos) == body_of(expected, eos), name
    return "equal"


def continued(name: str, turns: list[Turn], draw: random.Random) -> str:
    tokenizer = tokenizer_of(name)
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    if tools and drops(tokenizer, turns[:1], tools, is_open=True):
        tools = None
    is_exact = num_shared_turns(tokenizer, turns, tools) == len(turns)
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not is_exact or len(answers) < 2:
        return "sampled"
    control = control_tokens(tokenizer, tokenizer.chat_template).counted
    renderer, options = Renderer(tokenizer), {"tools": tools or (), "row": "a conversation"}
    ids = renderer.opening(turns[: answers[0]], **options)
    for index, following in itertools.pairwise(answers):
        prompt = rendered(tokenizer, turns[:index], tools, is_open=True)
        full = rendered(tokenizer, turns[: index + 1], tools, is_open=False)
        assert prompt is not None
        assert full is not None
        sampled = tokenizer.encode(full.removeprefix(prompt).rstrip(), add_special_tokens=False)
        if "tool_calls" not in turns[index] and draw.random() < 0.5:  # cut at the token limit
            while sampled[-1] in control:
                sampled.pop()
        ids += sampled
        past, new = turns[: index + 1], turns[index + 1 : following]
        ids += renderer.continuation(past, new, last_token=ids[-1], **options)
        expected = rendered(tokenizer, turns[:following], tools, is_open=True)
        assert tokenizer.decode(ids) == expected, name
    return "equal"


def outcomes(play: Callable[[str, list[Turn], random.Random], str]) -> dict[str, int]:
    draw = random.Random(0)
    return Counter(play(name, conversation(draw), draw) for name in NAMES for _ in range(8))


@pytest.mark.slow
def test_masks_of_random_conversations_are_exact() -> None:
    counts = outcomes(lambda name, turns, _: trained(name, turns))
    assert counts["equal"] > 100
    assert counts["sampled"] > 50


@pytest.mark.slow
def test_continuations_of_random_conversations_equal_the_template() -> None:
    assert outcomes(continued)["equal"] > 100
