"""Sampling from logits: by hand, and frequencies of many samples."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.backends.decoding.requests import (
    Completed,
    Decoding,
    DecodingRequest,
    as_batch,
    read_requests,
    row_seeds,
)
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, SamplingConfig
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, DataError

# Probabilities 0.4, 0.3, 0.2, 0.1.
LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def decoding(num_rows: int = 1, *, greedy: bool = False, **words: Any) -> Decoding:
    config = SamplingConfig(**{"max_new_tokens": 8, **words})
    requests = [DecodingRequest([1], seed, config.max_new_tokens) for seed in range(num_rows)]
    return Decoding(requests, config, greedy=greedy, stop_token_ids=[99])


def sampled_shares(num_rows: int, **words: Any) -> torch.Tensor:
    """Returns the share of each token among samples of rows with different seeds."""
    tokens = decoding(num_rows, **words).draw(LOGITS.expand(num_rows, 4))
    return torch.bincount(tokens, minlength=4) / num_rows


def test_tokens_are_sampled_with_their_probabilities() -> None:
    # 3000 samples: three standard deviations of a share of 0.4 are 0.027.
    torch.testing.assert_close(sampled_shares(3000), LOGITS.exp(), atol=0.03, rtol=0)


def test_temperature_divides_logits() -> None:
    # Squares of 4, 3, 2, 1 over their sum of 30.
    expected = torch.tensor([16, 9, 4, 1]) / 30
    torch.testing.assert_close(sampled_shares(3000, temperature=0.5), expected, atol=0.03, rtol=0)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    torch.testing.assert_close(
        sampled_shares(3000, top_k=2), torch.tensor([4 / 7, 3 / 7, 0, 0]), atol=0.03, rtol=0
    )
    # 0.4 + 0.3 reach 0.65, so only the first two are left.
    torch.testing.assert_close(
        sampled_shares(3000, top_p=0.65), torch.tensor([4 / 7, 3 / 7, 0, 0]), atol=0.03, rtol=0
    )
    assert sampled_shares(100, top_k=1).tolist() == [1, 0, 0, 0]


def test_penalty_lowers_earlier_tokens() -> None:
    # Token 1 is the prompt: 1.0 / 2 is less than 0.9.
    state = decoding(greedy=True, repetition_penalty=2.0)
    assert state.draw(torch.tensor([[0.9, 1.0, -1.0]])).tolist() == [0]
    # Now 0 and 1 came before: 0.45 and 0.5; the logit below zero is multiplied.
    assert state.draw(torch.tensor([[0.9, 1.0, -1.0]])).tolist() == [1]
    assert state.draw(torch.tensor([[-1.0, -1.0, -1.5]])).tolist() == [2]


def test_logprobs_are_of_the_full_distribution_at_the_temperature() -> None:
    state = decoding(temperature=0.5, top_k=1)
    state.draw(LOGITS[None])
    assert state.completed()[0].logprobs == pytest.approx([torch.tensor(16 / 30).log().item()])
    state = decoding(greedy=True, temperature=0.5)
    state.draw(LOGITS[None])
    assert state.completed()[0].logprobs == pytest.approx([torch.tensor(0.4).log().item()])


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(6)), st.integers(1, 6))
def test_samples_of_a_row_do_not_depend_on_other_rows(order: list[int], count: int) -> None:
    def tokens(seeds: list[int]) -> dict[int, Any]:
        requests = [DecodingRequest([1], seed, 5) for seed in seeds]
        state = Decoding(requests, SamplingConfig(), greedy=False, stop_token_ids=[3])
        while not state.ended.all():
            state.draw(LOGITS.expand(len(seeds), 4))
        return dict(zip(seeds, state.completed(), strict=True))

    all_rows, some = tokens(list(range(6))), tokens(order[:count])
    assert some == {seed: all_rows[seed] for seed in order[:count]}


class Letters:
    """Token 0 is a, 1 is b, and so on."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join("abcdef"[token] for token in tokens)


def test_row_ends_with_a_stop_token_a_stop_string_or_its_limit() -> None:
    requests = [
        DecodingRequest([1], 0, 4),  # stop token 5
        DecodingRequest([1], 0, 4, ("bc",)),
        DecodingRequest([1], 0, 2),
        DecodingRequest([1], 0, 3, ("bcd",)),  # ends at its limit, where its stop string also ends
    ]
    state = Decoding(
        requests, SamplingConfig(), greedy=True, stop_token_ids=[5], tokenizer=Letters()
    )
    for tokens in ([0, 1, 0, 1], [5, 2, 0, 2], [0, 0, 0, 3]):
        state.draw(torch.nn.functional.one_hot(torch.tensor(tokens), 6).float())
    assert [(list(c.token_ids), c.truncated) for c in state.completed()] == [
        ([0, 5], False),
        ([1, 2], False),
        ([0, 0], True),
        ([1, 2, 3], False),
    ]
    assert state.ended.all()


@pytest.mark.parametrize(
    ("stop_string", "num_tokens"),
    [
        ("<bos>", 2),
        ("<bos>2", 3),  # a special token before other text
        ("1<bos>", 2),
        ("<pad> ", 5),  # the space is an added token that is not special
        (" ", 5),
        ("<unk>", 8),
        ("12", 7),  # not across the special token
        ("<bos>1", None),
    ],
)
def test_special_tokens_are_part_of_the_text_of_stop_strings(
    stop_string: str, num_tokens: int | None
) -> None:
    tokenizer = build_arithmetic_tokenizer()
    text = ["1", "<bos>", "2", "<pad>", " ", "12", "<unk>"]
    tokens = tokenizer.encode("".join(text), add_special_tokens=False)
    request = DecodingRequest([1], 0, len(tokens), (stop_string,))
    state = Decoding(
        [request], SamplingConfig(), greedy=True, stop_token_ids=[2], tokenizer=tokenizer
    )
    for token in tokens:
        state.draw(torch.nn.functional.one_hot(torch.tensor([token]), len(tokenizer)).float())
    (completion,) = state.completed()
    expected = tokens if num_tokens is None else tokens[:num_tokens]
    assert (completion.token_ids, completion.truncated) == (expected, num_tokens is None)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Decoding(
            [DecodingRequest([1], 0, 4, ("a",))], SamplingConfig(), greedy=True, stop_token_ids=[5]
        )


def batch(**columns: Any) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
            "input_lengths": torch.tensor([3, 1]),
            "seeds": torch.tensor([7, 8]),
            **columns,
        }
    )


def test_rows_have_separate_limits_and_stop_strings() -> None:
    config = HuggingFaceGenerationConfig(max_new_tokens=6, stop_strings=["x"])
    columns = {"max_new_tokens": torch.tensor([9, 2]), "stop_strings": [None, ["y"]]}
    assert read_requests(batch(**columns), config, max_model_len=8) == [
        DecodingRequest([1, 2, 3], 7, 5, ("x",)),  # 8 - 3 tokens are left
        DecodingRequest([4], 8, 2, ("x", "y")),
    ]


def test_prompt_without_room_is_refused() -> None:
    with pytest.raises(DataError, match="row 0 of"):
        read_requests(batch(), SamplingConfig(), max_model_len=3)
    with pytest.raises(DataError, match="row 1 of"):
        read_requests(batch(input_lengths=torch.tensor([1, 0])), SamplingConfig(), max_model_len=9)


def test_completions_directly_follow_their_prompts() -> None:
    requests = read_requests(batch(), SamplingConfig(), max_model_len=8)
    output = as_batch(requests, [Completed([5], [-0.5], False), Completed([6, 7], [-1, -2], True)])
    assert output["output_ids"].tolist() == [[1, 2, 3, 5], [4, 6, 7, 0]]
    assert output["logprobs"].tolist() == [[0, 0, 0, -0.5], [0, -1, -2, 0]]
    assert output["generation_lengths"].tolist() == [1, 2]
    assert output["unpadded_sequence_lengths"].tolist() == [4, 3]
    assert output["truncated"].tolist() == [False, True]
    assert as_batch([], []).size == 0


def test_row_seeds_derive_from_one_seed() -> None:
    assert row_seeds(3, 4).tolist() == row_seeds(3, 4).tolist()
    assert set(row_seeds(3, 4).tolist()).isdisjoint(row_seeds(4, 4).tolist())
