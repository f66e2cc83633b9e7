from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl_core.data.chat import prompt_token_ids, supervised_example, text_example
from nemo_rl_core.data.control import encode_guarded
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError

ARITHMETIC = build_arithmetic_tokenizer()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def byte_bpe() -> PreTrainedTokenizerFast:
    """A real byte-level BPE, like that of SmolLM2 and Qwen, trained on a few sentences."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(
        ["user assistant What is the sum of forty-six? abab abab"] * 9, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML
    )


def _trained_text(tokenizer: Any, prompt: str, completion: str) -> str:
    example = supervised_example(tokenizer, prompt, completion)
    trained = [i for i, used in zip(example.token_ids, example.loss_mask, strict=True) if used]
    text: str = tokenizer.decode(trained)
    return text


def test_arithmetic_prompt_and_example_by_hand() -> None:
    # bos 1 2 + 3 4 =  and  4 6 eos
    assert prompt_token_ids(ARITHMETIC, "12+34=") == [1, 5, 6, 14, 7, 8, 17]
    example = supervised_example(ARITHMETIC, "12+34=", "46")
    assert example.token_ids == (1, 5, 6, 14, 7, 8, 17, 8, 10, 2)
    assert example.loss_mask == (False,) * 7 + (True,) * 3


def test_training_ends_with_the_end_of_turn_and_not_its_line_break(byte_bpe: Any) -> None:
    assert byte_bpe.decode(prompt_token_ids(byte_bpe, "What?")) == (
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert _trained_text(byte_bpe, "What?", "forty-six") == "forty-six<|im_end|>"


@settings(deadline=None)
@given(prompt=st.text(max_size=30), completion=st.text(min_size=1, max_size=30))
def test_the_mask_covers_only_the_completion_and_eos(
    byte_bpe: Any, prompt: str, completion: str
) -> None:
    example = supervised_example(byte_bpe, prompt, completion)
    start = prompt_token_ids(byte_bpe, prompt)
    assert list(example.token_ids[: len(start)]) == start
    assert example.loss_mask == (False,) * len(start) + (True,) * (
        len(example.token_ids) - len(start)
    )
    assert example.token_ids[-1] == byte_bpe.eos_token_id
    assert _trained_text(byte_bpe, prompt, completion) == completion + "<|im_end|>"


def test_a_template_without_eos_gets_it_appended(byte_bpe: Any) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]\n{% endfor %}"
    plain = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe.backend_tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    assert _trained_text(plain, "a", "b") == "[b]\n<|im_end|>"
    # An end token in the text does not end the turn.
    assert _trained_text(plain, "a", "b<|im_end|>c") == "[b<|im_end|>c]\n<|im_end|>"


def test_without_a_template_the_text_is_unchanged(byte_bpe: Any) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe.backend_tokenizer, eos_token="<|endoftext|>"
    )
    assert plain.decode(prompt_token_ids(plain, "sum: ")) == "sum: "
    assert _trained_text(plain, "sum:", " 46") == " 46<|endoftext|>"


def test_a_boundary_that_moves_is_refused_and_named(byte_bpe: Any) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe.backend_tokenizer, eos_token="<|endoftext|>"
    )
    # "ab" is one token of this vocabulary, so "a" is not a prefix of "a" + "bab".
    with pytest.raises(DataError, match="row with prompt 'a'"):
        supervised_example(plain, "a", "bab")


def test_an_answer_follows_its_prompt_if_the_template_changes_the_prompt(byte_bpe: Any) -> None:
    template = "{{ messages | length }}" + CHATML
    shifting = PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe.backend_tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    example = supervised_example(shifting, "a", "b")
    assert shifting.decode(example.token_ids) == (
        "1<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert example.num_trained_tokens == 2
    shifting.chat_template = CHATML.replace("assistant\n{% endif %}", "other\n{% endif %}")
    with pytest.raises(DataError, match="cannot be split"):
        supervised_example(shifting, "a", "b")


def test_no_eos_and_an_empty_completion_are_refused(byte_bpe: Any) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=byte_bpe.backend_tokenizer)
    with pytest.raises(DataError, match="no end-of-sequence"):
        supervised_example(endless, "a", "b")
    with pytest.raises(DataError, match="empty completion"):
        supervised_example(ARITHMETIC, "1+1=", "")


@pytest.mark.parametrize(
    ("added", "begins"),
    [
        ("$A", ""),
        ("$A <eos>", ""),  # as T5, and Llama with add_eos_token
        ("<bos> $A", "<bos>"),
        ("<bos> $A <eos>", "<bos>"),
        ("<cls> $A <sep>", "<cls>"),
        ("<bos> <cls> $A <sep> <eos>", "<bos><cls>"),
    ],
)
def test_prompts_do_not_end_with_tokens_of_a_post_processor(added: str, begins: str) -> None:
    special = ["<bos>", "<eos>", "<cls>", "<sep>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({text: n for n, text in enumerate([*special, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    core.post_processor = processors.TemplateProcessing(
        single=added, special_tokens=[(text, n) for n, text in enumerate(special)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer.decode(prompt_token_ids(tokenizer, "2+2=")) == f"{begins}2+2="
    for text in ("abc", "abc<eos>"):
        assert tokenizer.decode(text_example(tokenizer, text).token_ids) == f"{begins}abc<eos>"
    example = supervised_example(tokenizer, "2+2=", "4")
    assert tokenizer.decode(example.token_ids) == f"{begins}2+2=4<eos>"
    assert example.num_trained_tokens == 2
    ids = encode_guarded(tokenizer, "2+2=", add_special_tokens=True)
    assert tokenizer.decode(ids) == f"{begins}2+2="
    # A chat template writes all control tokens.
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    assert tokenizer.decode(prompt_token_ids(tokenizer, "2+2=")) == "<bos>2+2=<eos>"
    ids = encode_guarded(tokenizer, "2+2=", add_special_tokens=True)
    assert tokenizer.decode(ids) == f"{begins}2+2="
