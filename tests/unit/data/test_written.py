"""Parts of a turn that a chat template omits are refused, or named in the log."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_core.data.chat import conversation_example, prompt_token_ids, tokenize_row
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.turns import turns_of
from nemo_rl_core.data.written import unwritten_keys
from nemo_rl_core.errors import DataError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}
USER = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "4"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1"}
TAGGED_RESULT = {**RESULT, "content": "<tool_response>\n4\n</tool_response>"}
THINKING = {**ANSWER, "reasoning_content": "two and two"}


def templated(tokenizer: Any, content: str) -> Any:
    """ChatML with a piece of template in each turn."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


NAMES_ALONE = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
FIRST_CALL = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}"
CALL_OR_TEXT = (
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
)
NO_RESULTS = FIRST_CALL.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
TAGGED = (
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}{% else %}{{ m.content }}{% endif %}"
)
NO_THINKING = "{{ m.content.split('</think>')[-1] }}"
# Writes the text before the first end tag and after the last one, like Qwen3.
TWO_PARTS = "{{ m.content.split('</think>')[0] }}{{ m.content.split('</think>')[-1] }}"
SILENT = {"role": "assistant", "content": "", "function_calls": "add(a=2)"}
CALLS_ALONE = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
OTHER = {"type": "function", "function": {"name": "add", "arguments": {}, "keywords": {"a": 2}}}
NO_SYSTEM = "{{ m.content if m.role != 'system' }}"


@pytest.mark.parametrize(
    ("content", "turns", "fragment"),
    [
        ("{{ m.content }}", [USER, CALLING], "has tool_calls in a turn of 'assistant'"),
        ("{{ m.content }}", [USER, CALLING, RESULT, ANSWER], "has tool_calls"),
        (NAMES_ALONE, [USER, CALLING], "has tool_calls"),
        (FIRST_CALL, [USER, {**CALLING, "tool_calls": [CALL, CALL]}], "has tool_calls"),
        (CALL_OR_TEXT, [USER, {**CALLING, "content": "I add."}], "has text in a turn of"),
        (NO_RESULTS, [USER, CALLING, RESULT, ANSWER], "has text in a turn of 'tool'"),
        (NO_SYSTEM, [{**USER, "role": "system"}, USER, ANSWER], "has text in a turn of 'system'"),
        (NO_SYSTEM, [{**USER, "role": "developer"}, USER, ANSWER], "has text in a turn of"),
        ("{{ m.content }}", [USER, THINKING], "has reasoning_content"),
        ("{{ m.content }}", [USER, {**ANSWER, "thinking": "I add."}], "has thinking"),
        (NO_THINKING, [USER, {**ANSWER, "content": "<think>two</think>4"}], "text before </think>"),
        (NO_THINKING, [USER, {**ANSWER, "content": "<think>\n</think>4"}], None),
        (TWO_PARTS, [USER, {**ANSWER, "content": "<think>a</think>4<think>b</think>4"}], "before"),
        (TWO_PARTS, [USER, {**ANSWER, "content": "<think>a</think>4"}], None),
        ("{{ m.content }}", [USER, {**ANSWER, "function_calls": "add(a=2)"}], "has function_calls"),
        ("{{ m.content }}", [USER, SILENT, RESULT, ANSWER], "has function_calls"),
        (
            "{{ m.content }}",
            [{**USER, "role": "system", "functions": "[{}]"}, USER, ANSWER],
            "has f",
        ),
        ("{{ m.function_calls }}{{ m.content }}", [USER, SILENT, RESULT, ANSWER], None),
        (CALLS_ALONE, [USER, {**CALLING, "tool_calls": [OTHER]}], "has tool_calls"),
        (TAGGED, [USER, {**ANSWER, "content": "f()"}, TAGGED_RESULT, ANSWER], "also writes"),
        (TAGGED, [USER, {**ANSWER, "content": "f()"}, RESULT, ANSWER], None),
        ("{{ m.content }}", [USER, ANSWER, TAGGED_RESULT, ANSWER], None),
        # Valid conversations.
        (FIRST_CALL, [USER, CALLING, RESULT, ANSWER], None),
        (CALL_OR_TEXT, [USER, CALLING], None),
        (NO_SYSTEM, [USER, ANSWER], None),
        ("{{ m.reasoning_content }}{{ m.content }}", [USER, THINKING], None),
    ],
)
def test_content_that_the_template_leaves_out_is_refused(
    byte_tokenizer: Callable[[str], Any], content: str, turns: Any, fragment: str | None
) -> None:
    tokenizer = templated(byte_tokenizer("chatml"), content)
    if fragment is None:
        assert conversation_example(tokenizer, turns).num_trained_tokens
        return
    with pytest.raises(DataError, match=fragment):
        conversation_example(tokenizer, turns)


def test_prompts_and_pairs_are_looked_at_too(byte_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = byte_tokenizer("chatml")
    with pytest.raises(DataError, match="has tool_calls"):
        prompt_token_ids(tokenizer, json.dumps([USER, CALLING, RESULT]))
    pair = {"prompt": "2+2", "chosen": json.dumps([THINKING]), "rejected": "5"}
    with pytest.raises(DataError, match="has reasoning_content"):
        tokenize_row(tokenizer, pair)


def test_reasoning_has_the_key_that_the_template_reads(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    tokenizer = byte_tokenizer("calls")
    example, expected = (
        conversation_example(tokenizer, [USER, {**ANSWER, key: "I add."}])
        for key in ("thinking", "reasoning_content")
    )
    assert example == expected
    assert "<think>I add.</think>" in tokenizer.decode(example.token_ids)


def test_reasoning_of_earlier_turns_may_be_left_out(byte_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = byte_tokenizer("calls")
    example = conversation_example(tokenizer, [USER, THINKING, USER, THINKING], mask="final_turn")
    assert tokenizer.decode(example.token_ids).count("<think>two and two</think>4") == 1
    example = conversation_example(tokenizer, [USER, THINKING, USER, THINKING])
    assert tokenizer.decode(example.token_ids).count("<think>two and two</think>4") == 2


def test_other_keys_are_named_once(
    byte_tokenizer: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"messages": [USER, {**ANSWER, "weight": 1}]},
        *(
            {"messages": [{"role": "user", "content": f"{n}", "name": "Ann"}, ANSWER]}
            for n in range(5)
        ),
    ]
    with caplog.at_level(logging.WARNING):
        DataModule.of(rows, tokenizer=byte_tokenizer("chatml"), validation_fraction=0.2)
    warnings = [message for message in caplog.messages if "does not write" in message]
    assert warnings == [
        "the given data set: the chat template does not write name of user turns (first in row 1)"
    ]
    turns = turns_of([{**USER, "name": "Ann"}, CALLING, {**RESULT, "name": "add"}])
    assert unwritten_keys(byte_tokenizer("calls"), turns or []) == [
        "name of tool turns",
        "name of user turns",
        "tool_call_id of tool turns",
    ]
    written = templated(byte_tokenizer("chatml"), "{{ m.name }}{{ m.content }}")
    assert unwritten_keys(written, [{**USER, "name": "Ann"}]) == []


@pytest.mark.parametrize("arguments", [{"city": "Rome", "n": None}, '{"city": "Rome", "n": null}'])
def test_arguments_are_encoded_once(byte_tokenizer: Callable[[str], Any], arguments: Any) -> None:
    row = {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            },
        ],
        "mask": "final_turn",
    }
    for content in (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}",
        # Like the template of DeepSeek, which expects text.
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}"
        "{% endfor %}",
    ):
        tokenizer = templated(byte_tokenizer("chatml"), content)
        example = tokenize_row(tokenizer, row)["row"]
        assert '\n{"city": "Rome", "n": null}<|im_end|>' in tokenizer.decode(example.token_ids)


def test_a_developer_is_a_system_turn_where_the_template_knows_none(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    tokenizer = byte_tokenizer("chatml")
    prompt = json.dumps([{"role": "developer", "content": "Be brief."}, USER])
    text = tokenizer.decode(prompt_token_ids(tokenizer, prompt))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    knows = templated(tokenizer, "{% if m.role == 'developer' %}!{% endif %}{{ m.content }}")
    assert "developer\n!Be brief." in knows.decode(prompt_token_ids(knows, prompt))


def test_tool_results_have_a_role_of_the_template(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    olmo = templated(
        byte_tokenizer("chatml"), "{{ '!' if m.role == 'environment' }}{{ m.content }}"
    )
    turns = [USER, {**ANSWER, "content": "f()"}, {"role": "tool", "content": "4"}, ANSWER]
    text = olmo.decode(conversation_example(olmo, turns).token_ids)
    assert "<|im_start|>environment\n!4<|im_end|>" in text


def test_flags_reach_the_mask_and_not_the_template(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = templated(byte_tokenizer("chatml"), "{{ m | tojson }}")
    bad, good = {**ANSWER, "content": "bad"}, {**ANSWER, "content": "good"}
    trained_texts = []
    for flags in ({"weight": 0}, {"masked": True}, {"loss": False}):
        row = {"messages": [USER, {**bad, **flags}, USER, good], "mask": "all_assistant_turns"}
        example = tokenize_row(tokenizer, row)["row"]
        trained_texts.append([text for trained, text in runs(tokenizer, example) if trained])
        assert '"train"' not in tokenizer.decode(example.token_ids)
    assert trained_texts == [['{"role": "assistant", "content": "good"}<|im_end|>']] * 3
    # A row without a turn to train on, and pairs, are refused.
    tokenizer = byte_tokenizer("chatml")
    unwanted = [USER, {**ANSWER, "weight": 0}]
    rows: list[dict[str, Any]] = [{"messages": unwanted}]
    with pytest.raises(DataError, match="no token that is trained on"):
        DataModule.of(rows, tokenizer=tokenizer)
    rows = [{"prompt": "2+2", "chosen": unwanted[1:], "rejected": "5"}]
    with pytest.raises(DataError, match="has a turn with train: false"):
        DataModule.of(rows, tokenizer=tokenizer)
    rows = [{"prompt": "2+2", "completion": unwanted[1:]}]
    with pytest.raises(DataError, match="completion with train: false"):
        DataModule.of(rows, tokenizer=tokenizer)
    rows = [{"prompt": "2+2", "completion": [CALLING]}]
    with pytest.raises(DataError, match="completion with tool_calls"):
        DataModule.of(rows, tokenizer=tokenizer)


def test_two_turns_in_a_row_are_written_or_refused_by_the_template(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    turns = [USER, {**USER, "content": "3+3"}, ANSWER, {**ANSWER, "content": "6"}]
    tokenizer = byte_tokenizer("chatml")
    assert runs(tokenizer, conversation_example(tokenizer, turns)) == [
        (
            False,
            "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>user\n3+3<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "4<|im_end|>"),
        (False, "\n<|im_start|>assistant\n"),
        (True, "6<|im_end|>"),
    ]
    alternate = (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}"
    )
    with pytest.raises(DataError, match="roles must alternate"):
        conversation_example(templated(tokenizer, alternate), turns)
    with pytest.raises(DataError, match="has role 'assistant' after 'assistant'"):
        DataModule.of([{"prompt": [USER, ANSWER], "answer": "4"}])
