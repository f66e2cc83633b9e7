"""Completions of the training worker."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate

PROMPTS = [[5, 6, 7, 8], [9], [4, 4]]


def make_prompts() -> BatchedDataDict:
    return collate(PROMPTS, [[True] * len(prompt) for prompt in PROMPTS])


def make_backend(folder: Path) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(),
            max_tokens_per_microbatch=64,
            temperature=0.7,
        )
    )
    return backend


def test_greedy_completions_take_the_likeliest_tokens(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    stops = stop_token_ids(tiny_model, load_tokenizer(tiny_model))
    output = make_backend(tiny_model).generate(make_prompts(), greedy=True, max_new_tokens=5)
    for row, prompt in enumerate(PROMPTS):
        ids, logprobs = list(prompt), []
        while len(logprobs) < 5 and not (logprobs and ids[-1] in stops):
            distribution = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(distribution.argmax()))
            logprobs.append(float(distribution.max()))
        length = int(output["unpadded_sequence_lengths"][row])
        assert output["output_ids"][row, :length].tolist() == ids
        assert output["generation_lengths"][row] == len(logprobs)
        assert bool(output["truncated"][row]) == (ids[-1] not in stops)
        actual = output["logprobs"][row, len(prompt) : length]
        torch.testing.assert_close(actual, torch.tensor(logprobs), rtol=1e-5, atol=1e-5)
        assert not output["logprobs"][row, : len(prompt)].any()


def test_samples_repeat_with_a_seed_and_have_the_trainers_logprobs(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    before = torch.get_rng_state()
    first = backend.generate(make_prompts(), greedy=False, max_new_tokens=12, seed=3)
    again = backend.generate(make_prompts(), greedy=False, max_new_tokens=12, seed=3)
    other = backend.generate(make_prompts(), greedy=False, max_new_tokens=12, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first["output_ids"], again["output_ids"])
    assert first["output_ids"].tolist() != other["output_ids"].tolist()

    lengths = first["unpadded_sequence_lengths"].tolist()
    sequences = [row[:end].tolist() for row, end in zip(first["output_ids"], lengths, strict=True)]
    masks = [
        [index >= len(prompt) for index in range(end)]
        for prompt, end in zip(PROMPTS, lengths, strict=True)
    ]
    batch = collate(sequences, masks)
    trained = backend.get_logprobs(batch)
    torch.testing.assert_close(first["logprobs"][:, 1:], trained, rtol=1e-4, atol=1e-5)


def test_sampling_options_and_additional_stop_tokens(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    greedy = backend.generate(make_prompts(), greedy=True, max_new_tokens=5)
    first = int(greedy["output_ids"][0, 4])
    stopped = backend.generate(
        make_prompts(), greedy=False, max_new_tokens=5, top_k=1, stop_token_ids=[first]
    )
    assert stopped["generation_lengths"][0] == 1
    assert stopped["output_ids"][0, 4] == first
    assert not stopped["truncated"][0]


@pytest.mark.slow
def test_stop_strings_are_matched_with_the_models_tokenizer(tiny_model: Path) -> None:
    backend, tokenizer = make_backend(tiny_model), load_tokenizer(tiny_model)
    plain = backend.generate(make_prompts(), greedy=False, max_new_tokens=4, seed=3)
    first = int(plain["output_ids"][0, len(PROMPTS[0])])
    output = backend.generate(
        make_prompts(),
        greedy=False,
        max_new_tokens=4,
        seed=3,
        stop_strings=[tokenizer.decode([first])],
    )
    assert output["generation_lengths"][0] == 1 < plain["generation_lengths"][0]
