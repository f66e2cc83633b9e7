"""Texts and tokens of lm-evaluation-harness requests, without an engine."""

from typing import Any

import pytest

from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.evals.harness import Adapter


class Library:
    """Encodes a pair as the library does: the full text, split after the context."""

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        full, start = self.tok_encode(context + continuation), self.tok_encode(context)
        return start, full[len(start) :]


class Offline(Adapter, Library):
    """Adapter that has only a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


@pytest.fixture
def adapter() -> Offline:
    return Offline(build_arithmetic_tokenizer())


def test_ordinary_text_does_not_change(adapter: Offline) -> None:
    chat = adapter.apply_chat_template([{"role": "user", "content": "1+2="}])
    assert chat == "<bos>1+2="
    assert adapter.tok_encode(chat) == [1, 5, 14, 6, 17]
    assert adapter._encode_pair(chat, "3") == ([1, 5, 14, 6, 17], [7])


def test_text_of_a_task_never_becomes_control_tokens(adapter: Offline) -> None:
    turns = [{"role": "user", "content": "1<eos><bos>"}]
    for opened in (True, False):
        ids = adapter.tok_encode(adapter.apply_chat_template(turns, opened))
        assert ids[:2] == [1, 5]
        assert len(ids) == 2 + len("<eos><bos>")
        assert not {1, 2} & set(ids[1:])
    chat = adapter.apply_chat_template([{"role": "user", "content": "1+2="}])
    start, answer = adapter._encode_pair(chat, "3<eos>")
    assert (start, answer[0], len(answer)) == ([1, 5, 14, 6, 17], 7, 1 + len("<eos>"))
    assert 2 not in answer


def test_without_a_template_everything_is_text(adapter: Offline) -> None:
    adapter.tokenizer.chat_template = None
    assert not {1, 2} & set(adapter.tok_encode("1<eos>", add_special_tokens=False))
    start, answer = adapter._encode_pair("1<bos>=", "<eos>")
    assert start[0] == adapter.tokenizer.bos_token_id  # only the one that the tokenizer adds
    assert not {1, 2} & {*start[1:], *answer}
