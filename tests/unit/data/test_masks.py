"""Loss masks of conversations, template by template."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.data.chat import (
    conversation_example,
    preference_example,
    prompt_token_ids,
    supervised_example,
    text_example,
    tokenize_row,
)
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pretrained import set_template
from nemo_rl_core.errors import DataError

Turns = list[dict[str, Any]]


ENDS_BETWEEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}<|endoftext|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant: {% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SUMS: Turns = [user("2+2"), assistant("4"), user("3+3"), assistant("6")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "chatml",
            [
                (False, "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"),
                (True, "4<|im_end|>"),
                (False, "\n<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"),
                (True, "6<|im_end|>"),
            ],
        ),
        (
            "headers",
            [
                (
                    False,
                    "<|begin|><|header|>user<|/header|>\n\n2+2<|eot|>"
                    "<|header|>assistant<|/header|>\n\n",
                ),
                (True, "4<|eot|>"),
                (
                    False,
                    "<|header|>user<|/header|>\n\n3+3<|eot|><|header|>assistant<|/header|>\n\n",
                ),
                (True, "6<|eot|>"),
            ],
        ),
        (
            "default_system",
            [
                (
                    False,
                    "<|im_start|>system\nBe brief.<|im_end|>\n"
                    "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n",
                ),
                (True, "4<|im_end|>"),
                (False, "\n<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"),
                (True, "6<|im_end|>"),
            ],
        ),
        (
            # Texts end with another token than turns; it is added after the last turn.
            "two_ends",
            [
                (False, "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"),
                (True, "4<|im_end|>"),
                (False, "\n<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"),
                (True, "6<|im_end|>\n<|endoftext|>"),
            ],
        ),
    ],
)
def test_every_answer_is_trained_on_through_its_end(
    byte_tokenizer: Callable[[str], Any],
    runs: Callable[..., Any],
    template: str,
    expected: list[tuple[bool, str]],
) -> None:
    tokenizer = byte_tokenizer(template)
    assert runs(tokenizer, conversation_example(tokenizer, SUMS)) == expected
    # Only the last turn is trained on: all text before it is one masked run.
    last = runs(tokenizer, conversation_example(tokenizer, SUMS, mask="final_turn"))
    assert last == [(False, "".join(text for _, text in expected[:3])), expected[3]]


def test_the_mask_by_token_numbers(byte_tokenizer: Callable[[str], Any]) -> None:
    # <|begin|> header u s e r /header \n \n a eot = 11, header assistant(9) /header \n \n = 13,
    # so tokens 0-23 are the prompt; "bc" and eot are 24, 25, 26.
    example = conversation_example(byte_tokenizer("headers"), [user("a"), assistant("bc")])
    assert example.loss_mask == (False,) * 24 + (True,) * 3
    assert example.num_trained_tokens == 3
    assert example.token_ids[-1] == byte_tokenizer("headers").eos_token_id


def test_system_and_tool_turns_are_masked(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("calls")
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    calling = {"role": "assistant", "content": "add", "tool_calls": [call]}
    turns = [
        {"role": "system", "content": "s"},
        user("u"),
        calling,
        {"role": "tool", "content": "5"},
        assistant("five"),
    ]
    assert [
        text for trained, text in runs(tokenizer, conversation_example(tokenizer, turns)) if trained
    ] == [
        'add<call>{"name": "add", "arguments": {"x": 1}}</call><|im_end|>',
        "five<|im_end|>",
    ]


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=6).filter(
        lambda texts: len(texts) % 2 == 0
    )
)
def test_the_trained_text_is_the_assistants(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any], texts: list[str]
) -> None:
    tokenizer = byte_tokenizer("chatml")
    turns = [(assistant if index % 2 else user)(text) for index, text in enumerate(texts)]
    example = conversation_example(tokenizer, turns)
    trained = [text for is_trained, text in runs(tokenizer, example) if is_trained]
    assert trained == [f"{text}<|im_end|>" for text in texts[1::2]]
    # The full text has the same tokens: turn boundaries do not change tokens.
    text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
    assert list(example.token_ids) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", ["chatml", "headers", "default_system", "two_ends", "none"])
def test_a_pair_is_a_conversation_of_two_turns(
    byte_tokenizer: Callable[[str], Any], template: str
) -> None:
    tokenizer = byte_tokenizer(template)
    example = conversation_example(tokenizer, [user("2+2="), assistant("4")])
    assert example == supervised_example(tokenizer, "2+2=", "4")
    start = prompt_token_ids(tokenizer, "2+2=")
    assert list(example.token_ids[: len(start)]) == start
    assert not any(example.loss_mask[: len(start)])
    assert all(example.loss_mask[len(start) :])


@pytest.mark.parametrize("template", ["chatml", "headers", "default_system"])
def test_a_prompt_may_be_a_conversation(
    byte_tokenizer: Callable[[str], Any], template: str
) -> None:
    tokenizer = byte_tokenizer(template)
    prompt = json.dumps(SUMS[:-1])
    example = supervised_example(tokenizer, prompt, "6")
    assert example == conversation_example(tokenizer, SUMS, mask="final_turn")
    ids = prompt_token_ids(tokenizer, prompt)
    assert ids == tokenizer.apply_chat_template(SUMS[:-1], add_generation_prompt=True)["input_ids"]
    assert list(example.token_ids[: len(ids)]) == ids


def test_a_prompt_of_several_turns_needs_a_chat_template(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    with pytest.raises(DataError, match="no chat template"):
        prompt_token_ids(byte_tokenizer("none"), json.dumps(SUMS[:-1]))


def test_turns_stay_as_sampled_if_the_template_drops_their_reasoning_later(
    byte_tokenizer: Callable[[str], Any],
    runs: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_tokenizer("forgetful")
    turns = [user("2+2"), assistant("<think>hm</think>4"), user("3+3"), assistant("6")]
    assert runs(tokenizer, conversation_example(tokenizer, turns)) == [
        (False, "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>hm</think>4<|im_end|>"),
        (False, "\n<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"),
        (True, "6<|im_end|>"),
    ]
    assert "rewrites past turns of the assistant (it removes their reasoning)" in caplog.text
    # The last turn is rendered as it is sampled, without the earlier reasoning.
    last = conversation_example(tokenizer, turns, mask="final_turn")
    assert runs(tokenizer, last) == [
        (
            False,
            "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "6<|im_end|>"),
    ]


def test_an_answer_that_shares_a_token_with_its_prompt_is_encoded_after_it(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    core = byte_tokenizer("none").backend_tokenizer
    core.add_tokens(["\n\n"])  # as in the vocabulary of Qwen
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=template
    )
    turns = [user("a"), assistant("\nb"), user("c"), assistant("\nd")]
    example = conversation_example(tokenizer, turns)
    assert runs(tokenizer, example) == [
        (False, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        (True, "\nb<|im_end|>"),
        (False, "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        (True, "\nd<|im_end|>"),
    ]
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
    assert list(example.token_ids[: len(prompt)]) == prompt


# Qwen3-Thinking: prompts open the reasoning, and an answer without reasoning closes it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ '<think>\n' }}{% if '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[0].split('<think>')[-1].strip() }}{% endif %}"
    "{{ '\n</think>\n\n' + m['content'].split('</think>')[-1].strip() }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("4", "\n</think>\n\n4<|im_end|>"),
        ("<think>\ntwo\n</think>\n\n4", "two\n</think>\n\n4<|im_end|>"),
        ("two\n</think>\n\n4", "two\n</think>\n\n4<|im_end|>"),
    ],
)
def test_an_answer_follows_the_tokens_that_sampling_starts_from(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any], answer: str, trained: str
) -> None:
    core = byte_tokenizer("none").backend_tokenizer
    core.add_tokens(["\n\n"])  # as in the vocabulary of Qwen
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=THINKING
    )
    example = supervised_example(tokenizer, "2+2", answer)
    prompt = prompt_token_ids(tokenizer, "2+2")
    assert list(example.token_ids[: len(prompt)]) == prompt
    assert runs(tokenizer, example) == [(False, tokenizer.decode(prompt)), (True, trained)]
    turns = [user("1+1"), assistant("2"), user("2+2"), assistant(answer)]
    last = runs(tokenizer, conversation_example(tokenizer, turns, mask="final_turn"))
    assert last[-1] == (True, trained)
    # Each answer follows the tokens that it would be sampled after.
    every = runs(tokenizer, conversation_example(tokenizer, turns))
    assert [text for is_trained, text in every if is_trained] == [
        "\n</think>\n\n2<|im_end|>",
        trained,
    ]
    assert every[2][1].endswith("<|im_start|>assistant\n<think>\n")
    if answer != "4":  # the template splits the content
        with pytest.raises(DataError):
            supervised_example(tokenizer, "2+2", f"{answer}<|im_end|>")
        return
    # The rest is encoded separately, and spells no control token there either.
    forged = supervised_example(tokenizer, "2+2", f"{answer}<|im_end|>").token_ids
    assert forged.count(tokenizer.eos_token_id) == example.token_ids.count(tokenizer.eos_token_id)
    assert tokenizer.decode(forged).endswith("4<|im_end|><|im_end|>")


def test_variables_of_the_recipe_reach_prompts_and_answers(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("chatml")
    # Qwen3: an empty block before the last answer, but in prompts only with enable_thinking: false.
    empty = "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    answered = "{% if m['role'] == 'assistant' and loop.last %}" + empty + "{{ m['content'] }}"
    opening = "assistant\n{% if enable_thinking is defined and not enable_thinking %}" + empty
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", answered
    ).replace("assistant\n{% endif %}", opening + "{% endif %}")
    thinks = runs(tokenizer, supervised_example(tokenizer, "2+2", "4"))
    assert thinks[-1] == (True, "<think>\n\n</think>\n\n4<|im_end|>")
    model = ModelFromConfig(chat_template_kwargs={"enable_thinking": False})
    set_template(tokenizer, model)
    assert tokenizer.decode(prompt_token_ids(tokenizer, "2+2")).endswith("</think>\n\n")
    assert runs(tokenizer, supervised_example(tokenizer, "2+2", "4"))[-1] == (True, "4<|im_end|>")


def test_an_answer_follows_a_prompt_that_the_template_never_continues(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("chatml")
    # DeepSeek-R1: prompts open the reasoning, and conversations have none.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    prompt = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for thoughts in ("", "I add.", "<|im_end|>"):
        turn = {"role": "assistant", "content": "4", "reasoning_content": thoughts}
        example = conversation_example(tokenizer, [user("2+2"), turn])
        assert runs(tokenizer, example) == [
            (False, prompt),
            (True, f"{thoughts}\n</think>\n\n4<|im_end|>"),
        ]
        (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
        assert example.token_ids.count(end) == 2  # a text that spells one is none


def test_conversations_that_cannot_be_rendered_are_refused(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    with pytest.raises(DataError, match="no chat template"):
        conversation_example(byte_tokenizer("none"), SUMS)
    with pytest.raises(DataError, match="has no assistant turn"):
        conversation_example(byte_tokenizer("chatml"), SUMS[:1])


def test_turns_after_the_last_answer_are_left_out(byte_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = byte_tokenizer("chatml")
    assert SUMS[2]["role"] == "user"
    expected = conversation_example(tokenizer, SUMS[:2])
    assert conversation_example(tokenizer, SUMS[:3]) == expected


def test_plain_text_is_trained_on_whole(byte_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = byte_tokenizer("chatml")
    example = text_example(tokenizer, "abc")
    # Nothing predicts the first token: b, c and the end are trained on.
    assert tokenizer.decode(list(example.token_ids)) == "abc<|im_end|>"
    assert example.loss_mask == (False, True, True, True)
    assert text_example(tokenizer, "abc<|im_end|>") == example


def test_a_pair_shares_its_prompt(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("chatml")
    plain = {"prompt": "2+2", "chosen": "4", "rejected": "five"}
    chosen, rejected = preference_example(tokenizer, plain)
    prompt = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert runs(tokenizer, chosen) == [(False, prompt), (True, "4<|im_end|>")]
    assert runs(tokenizer, rejected) == [(False, prompt), (True, "five<|im_end|>")]
    as_turns = {
        "prompt": '[{"role": "user", "content": "2+2"}]',
        "chosen": [assistant("4")],
        "rejected": '[{"role": "assistant", "content": "five"}]',
    }
    assert preference_example(tokenizer, as_turns) == (chosen, rejected)
    assert tokenize_row(tokenizer, plain) == {"chosen": chosen, "rejected": rejected}


def test_answers_in_the_prompt_of_a_pair_are_masked(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("chatml")
    row = {"prompt": SUMS[:3], "chosen": [SUMS[3]], "rejected": [assistant("7")]}
    for example, answer in zip(preference_example(tokenizer, row), "67", strict=True):
        assert [part[0] for part in runs(tokenizer, example)] == [False, True]
        assert runs(tokenizer, example)[1] == (True, f"{answer}<|im_end|>")


def test_rows_are_cut_where_they_say() -> None:
    example = SupervisedExample((5, 6, 7, 8), (False, False, True, True))
    assert example.truncated(3) == SupervisedExample((5, 6, 7), (False, False, True))
    assert example.truncated(None) == example
    assert example.truncated(2).num_trained_tokens == 0
    # A first token is never predicted, for any mask.
    assert SupervisedExample((5,), (True,)).num_trained_tokens == 0


def test_an_end_token_that_is_only_between_turns_is_trained_on(
    byte_tokenizer: Callable[[str], Any], runs: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer("none")
    tokenizer.chat_template = ENDS_BETWEEN
    trained = [
        text for is_kept, text in runs(tokenizer, conversation_example(tokenizer, SUMS)) if is_kept
    ]
    assert trained == ["4<|endoftext|>", "6<|endoftext|>"]
