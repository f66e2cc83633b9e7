"""Prompts that are refused only by their number of characters."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl_core.data.lengths import is_certainly_longer, refuse_long_rollouts
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import ConfigError, DataError
from tests.validated import validate_rows


def words(*, unknown: str | None = "<unk>", split: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer of words, the longest with five characters."""
    vocabulary = {"<unk>": 0, "<eos>": 1, "abcde": 2, "b": 3}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = split or pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token=unknown)


class Unread:
    """A tokenizer that fails when it is asked for tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        assert name not in ("encode", "__call__"), "the prompt was tokenized"
        return getattr(self._tokenizer, name)


def test_ten_megabytes_are_refused_before_they_are_tokenized() -> None:
    row = {"id": "0", "prompt": "1+" * 5_000_000 + "1=", "answer": "1", "completion": "1"}
    rows: list[dict[str, Any]] = [{**row, "task": "sum", "metadata": "{}"}]
    unread = Unread(build_arithmetic_tokenizer())
    with pytest.raises(
        DataError, match=r"more than 16 tokens \(max_prompt_tokens\): rows 0"
    ) as refused:
        validate_rows(rows, tokenizer=unread, max_prompt_tokens=16, name="train")
    # The number of tokens is unknown.
    assert refused.value.fix.startswith("raise data.max_prompt_tokens, or drop")


def test_the_bound_is_exact() -> None:
    tokenizer = words()
    assert not is_certainly_longer(tokenizer, " ".join(["abcde"] * 4), 4)
    assert is_certainly_longer(tokenizer, " ".join(["abcde"] * 4 + ["b"]), 4)
    # White space is not a token of this tokenizer.
    assert not is_certainly_longer(tokenizer, "abcde" + " \n" * 1000 + "b", 2)


def test_characters_that_a_normalizer_or_a_template_drops_do_not_count() -> None:
    tokenizer = words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("#", "")
    assert not is_certainly_longer(tokenizer, "abcde" + "#" * 1000, 1)
    assert len(tokenizer.encode("abcde" + "#" * 1000)) == 1
    tokenizer = words()
    tokenizer.chat_template = "{{ messages[0]['content'][:5] }}"
    assert not is_certainly_longer(tokenizer, "abcde" * 1000, 1)


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(unknown="<eos>"),  # What is unknown would be a legal token of any length.
        words(split=pre_tokenizers.Split("x", behavior="removed")),
        words(split=pre_tokenizers.CharDelimiterSplit("x")),
    ],
)
def test_nothing_is_certain_where_characters_may_vanish(tokenizer: Any) -> None:
    assert not is_certainly_longer(tokenizer, "x" * 10_000, 1)


def test_rollouts_beyond_the_context_or_a_change_of_rotary_embeddings_are_refused() -> None:
    refuse_long_rollouts(40, 24, settings="prompt + new", limit=64, context=64)
    refuse_long_rollouts(40, 24, settings="prompt + new", limit=None, context=None)
    with pytest.raises(ConfigError, match="than the model's context") as refused:
        refuse_long_rollouts(40, 25, settings="prompt + new", limit=64, context=64)
    assert refused.value.expected == "prompt + new <= 64"
    with pytest.raises(ConfigError, match="rotary embeddings change") as refused:
        refuse_long_rollouts(40, 25, settings="prompt + new", limit=64, context=256)
    assert "short_factor" in refused.value.fix
