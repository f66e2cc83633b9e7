"""Small tokenizers with chat templates like those of models."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# Writes calls, and the reasoning of only the last turn, like Qwen3.
CALLS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}",
)
# Puts a system turn in front of conversations that have none.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    + CHATML
)
# Leaves out the reasoning of all answers except the last.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "headers": (HEADERS, "<|eot|>"),
    "calls": (CALLS, "<|im_end|>"),
    "default_system": (DEFAULT_SYSTEM, "<|im_end|>"),
    "forgetful": (FORGETFUL, "<|im_end|>"),
    # Like base models with a chat template: turns end with another token than texts.
    "two_ends": (CHATML, "<|endoftext|>"),
    "none": (None, "<|endoftext|>"),
}


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[str], Any]:
    """Builds a byte-level tokenizer with special tokens and a chat template of `TEMPLATES`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}

    def build(name: str) -> Any:
        core = Tokenizer(models.BPE(vocabulary, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(list(SPECIAL))
        template, eos = TEMPLATES[name]
        return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, chat_template=template)

    return build


@pytest.fixture(scope="session")
def runs() -> Callable[..., list[tuple[bool, str]]]:
    """Splits an example into runs of text that are trained on or not."""

    def of(tokenizer: Any, example: Any) -> list[tuple[bool, str]]:
        pairs = zip(example.loss_mask, example.token_ids, strict=True)
        return [
            (trained, tokenizer.decode([token for _, token in run]))
            for trained, run in itertools.groupby(pairs, key=lambda pair: pair[0])
        ]

    return of
