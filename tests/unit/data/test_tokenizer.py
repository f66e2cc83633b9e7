import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.data.chat import (
    conversation_example,
    preference_example,
    prompt_token_ids,
    supervised_example,
    text_example,
)
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.sampled_turns import TurnReader
from nemo_rl_core.data.tokenizer import (
    CHARACTERS,
    build_arithmetic_tokenizer,
    build_byte_tokenizer,
)
from nemo_rl_core.errors import DataError

TOKENIZER = build_arithmetic_tokenizer()
BYTES = build_byte_tokenizer()


def reply_token_ids(
    tokenizer: Any, prompt: str, message: dict[str, str], *, last_token: int | None
) -> list[int]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "0"}]
    renderer = Renderer(tokenizer)
    return renderer.continuation(turns, [message], last_token=last_token, row="a turn")


def test_ids_are_specials_then_characters() -> None:
    assert len(TOKENIZER) == 19
    assert TOKENIZER.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<unk>"]) == [0, 1, 2, 3]
    # Digit d is 4 + d; then + - * = space are 14 to 18.
    assert TOKENIZER.encode("90+-*= ") == [1, 13, 4, 14, 15, 16, 17, 18]


@given(st.text(alphabet=CHARACTERS, max_size=50))
def test_text_round_trips_one_token_a_character(text: str) -> None:
    start, *ids = TOKENIZER.encode(text)
    assert start == TOKENIZER.bos_token_id
    assert ids == TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["a", "\u00e9", "\n", "\U0001f600", "\u0664"])
def test_other_characters_are_unknown_and_not_dropped(text: str) -> None:
    assert TOKENIZER.encode(text) == [1, 3]


def test_bytes_are_tokens_after_the_special_ones() -> None:
    assert len(BYTES) == 260
    assert BYTES.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>"]) == [0, 1, 2]
    assert BYTES.unk_token_id == BYTES.pad_token_id
    assert len(BYTES.encode("a\u86c7", add_special_tokens=False)) == 1 + 3


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_round_trips_through_bytes(text: str) -> None:
    ids = BYTES(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert len(ids) == len(text.encode())
    assert min(ids, default=3) >= 3
    assert BYTES.decode(ids) == text


def test_bytes_complete_a_prompt_as_they_were_trained_to() -> None:
    example = supervised_example(BYTES, "abc \u00e9", "\u00e9 cba")
    prompt = prompt_token_ids(BYTES, "abc \u00e9")
    assert prompt == BYTES("abc \u00e9")["input_ids"]
    assert list(example.token_ids[: len(prompt)]) == prompt
    trained = [t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m]
    assert trained == [*BYTES.encode("\u00e9 cba", add_special_tokens=False), BYTES.eos_token_id]


def test_the_template_of_bytes_writes_tools_and_calls() -> None:
    parameters = {"type": "object", "properties": {"item": {}, "count": {}}}
    tools = [{"type": "function", "function": {"name": "price", "parameters": parameters}}]
    arguments = {"item": 'a "pear"', "count": 2}
    call = {"type": "function", "function": {"name": "price", "arguments": arguments}}
    called = json.dumps({"name": "price", "arguments": arguments})
    written = f"<tool_call>\n{called}\n</tool_call>"
    turns = [
        {"role": "user", "content": "2 pears?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    text = BYTES.apply_chat_template(turns, tools=tools, tokenize=False)
    assert text == (
        f"<bos>price(item, count)\n2 pears?{written}<eos><tool_response>6</tool_response>6<eos>"
    )
    call["function"]["arguments"] = json.dumps(arguments)
    assert BYTES.apply_chat_template(turns, tools=tools, tokenize=False) == text
    sampled = BYTES.encode(f"{written}<eos>", add_special_tokens=False)
    turn = TurnReader(BYTES).read(np.array(sampled), tools=tools).turn
    (read,) = turn["tool_calls"]
    assert read["function"] == {"name": "price", "arguments": arguments}
    del call["function"]["arguments"]
    text = BYTES.apply_chat_template(turns, tools=tools, tokenize=False)
    assert '{"name": "price", "arguments": {}}' in text


def test_a_completion_that_cannot_be_written_is_not_trained_on() -> None:
    with pytest.raises(DataError) as caught:
        supervised_example(TOKENIZER, "1+1=", "two 2")
    assert "trains on characters that the tokenizer does not know" in caught.value.problem
    assert caught.value.got == "'t', 'w', 'o'; the model's tokenizer knows only ' *+-0123456789='"
    assert "text_from_config" in str(caught.value.fix)
    assert supervised_example(BYTES, "1+1=", "two 2").num_trained_tokens == 6


def test_special_tokens_are_left_out_when_asked() -> None:
    assert TOKENIZER.decode([1, 8, 10, 2, 0], skip_special_tokens=True) == "46"


@pytest.mark.slow
def test_saved_folders_are_equal_to_the_byte_across_processes(tmp_path: Path) -> None:
    program = (
        "import sys; from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer as build; "
        "build().save_pretrained(sys.argv[1])"
    )
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=True)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    second = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert first == second
    assert {"tokenizer.json", "tokenizer_config.json"} <= first.keys()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert loaded.eos_token_id == 2
    turns = [{"role": "user", "content": "1+2="}]
    assert loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<bos>1+2="
    )
    assert loaded.encode("1+2=") == TOKENIZER.encode("1+2=") == [1, 5, 14, 6, 17]


def test_no_road_puts_the_start_token_twice() -> None:
    """Training and rollouts get the same tokens from a tokenizer without a start token."""
    bare = build_arithmetic_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    assert bare.encode("1+2=") == [5, 14, 6, 17]
    turns = [("user", "9="), ("assistant", "5"), ("user", "3="), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    reply = {"role": "environment", "content": "3="}
    for row in load_rows(ArithmeticData(num_train=64, num_validation=1), seed=0)[0]:
        prompt, answer = row["prompt"], row["answer"]
        for road in (
            lambda t, p=prompt: prompt_token_ids(t, p),
            lambda t, p=prompt, a=answer: supervised_example(t, p, a),
            lambda t, p=prompt, a=answer: preference_example(
                t, {"prompt": p, "chosen": a, "rejected": "0", "max_tokens": 64}
            ),
            lambda t: conversation_example(t, messages),
            lambda t, p=prompt: reply_token_ids(t, p, reply, last_token=2),
        ):
            assert road(TOKENIZER) == road(bare)
    # A separate text, which no template renders, begins like a prompt.
    assert text_example(TOKENIZER, "12").token_ids == (1, 5, 6, 2)
