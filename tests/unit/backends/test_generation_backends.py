"""Transformers' loop and Megatron's model as engines sample the same and agree with a trainer."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.backends.generation.base import (
    GenerationBackend,
    GenerationSetup,
    get_generation_backend,
)
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, MegatronGenerationConfig
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.local_ranks import run_ranks

PROMPTS = [[5, 6, 7, 8], [9], [4, 4], [5, 6, 7, 8], [3, 8, 3]]
CONFIGS = {"hf": HuggingFaceGenerationConfig, "megatron": MegatronGenerationConfig}


def make_batch(rows: list[int] | None = None, **columns: Any) -> BatchedDataDict:
    batch = BatchedDataDict(
        {
            "input_ids": torch.tensor([prompt + [0] * (4 - len(prompt)) for prompt in PROMPTS]),
            "input_lengths": torch.tensor([len(prompt) for prompt in PROMPTS]),
            "seeds": torch.arange(len(PROMPTS)) + 40,
            **columns,
        }
    )
    return batch if rows is None else batch.select_indices(rows)


def setup_of(folder: Path, backend: str, **words: Any) -> GenerationSetup:
    return GenerationSetup(
        model_folder=folder,
        config=CONFIGS[backend](**{"max_new_tokens": 6, **words}),
        max_model_len=32,
        stop_token_ids=stop_token_ids(folder, load_tokenizer(folder)),
    )


class Engines:
    """Backends in this process, started once and given other sampling settings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Any] = {}

    def __call__(self, name: str, **words: Any) -> GenerationBackend:
        setup = setup_of(self._folder, name, **words)
        if name not in self._running:
            self._running[name] = get_generation_backend(name)()
            self._running[name].setup(setup)
        self._running[name]._setup = setup
        return self._running[name]

    def shutdown(self) -> None:
        for backend in self._running.values():
            backend.shutdown()


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[Engines]:
    made = Engines(tiny_model)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logprobs(model: Any, output: BatchedDataDict, row: int, scale: float) -> torch.Tensor:
    """Computes `[L]` logprobs of the completion's tokens with one forward pass."""
    end = int(output["unpadded_sequence_lengths"][row])
    start = end - int(output["generation_lengths"][row])
    ids = output["output_ids"][row, :end]
    logits = model(input_ids=ids[None]).logits[0, start - 1 : end - 1]
    logprobs = torch.log_softmax(logits / scale, -1)
    return logprobs.gather(1, ids[start:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("words", "greedy", "scale"),
    [
        ({"temperature": 0.7}, False, 0.7),
        ({"top_p": 0.6}, False, 1.0),
        ({"top_k": 3}, False, 1.0),
        ({"repetition_penalty": 1.5}, False, 1.0),
        ({"temperature": 0.7}, True, 1.0),
    ],
)
def test_logprobs_match_a_plain_forward_pass(
    engines: Engines, model: Any, name: str, words: dict, greedy: bool, scale: float
) -> None:
    output = engines(name, **words).generate(make_batch(), greedy=greedy)
    for row, prompt in enumerate(PROMPTS):
        end = int(output["unpadded_sequence_lengths"][row])
        actual = output["logprobs"][row]
        expected = plain_logprobs(model, output, row, scale)
        torch.testing.assert_close(actual[len(prompt) : end], expected, atol=1e-5, rtol=1e-4)
        assert not actual[: len(prompt)].any()
        assert not actual[end:].any()
        assert output["output_ids"][row, : len(prompt)].tolist() == prompt


@pytest.mark.parametrize("name", CONFIGS)
def test_top_1_sampling_is_greedy(engines: Engines, name: str) -> None:
    greedy = engines(name).generate(make_batch(), greedy=True)
    for words in ({"top_k": 1}, {"temperature": 0}):
        output = engines(name, **words).generate(make_batch(), greedy=False)
        assert torch.equal(output["output_ids"], greedy["output_ids"])
    sampled = engines(name).generate(make_batch(), greedy=False)
    assert sampled["output_ids"].tolist() != greedy["output_ids"].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_row_do_not_depend_on_other_rows(engines: Engines, name: str) -> None:
    engine = engines(name, temperature=0.9)
    all_rows = sequences(engine.generate(make_batch(), greedy=False))
    # Rows 0 and 3 have the same prompt; their seeds differ, and so do their completions.
    assert all_rows[0] != all_rows[3]
    for rows in ([4, 2, 0, 1, 3], [3], [2, 1]):
        some = sequences(engine.generate(make_batch(rows), greedy=False))
        assert some == [all_rows[row] for row in rows]
    assert engine.generate(make_batch([]), greedy=False).size == 0


def test_engines_sample_the_same_tokens(engines: Engines) -> None:
    sampled = [sequences(engines(name).generate(make_batch(), greedy=False)) for name in CONFIGS]
    assert sampled[0] == sampled[1]


def sequences(output: BatchedDataDict) -> list[list[int]]:
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [ids[:end].tolist() for ids, end in zip(output["output_ids"], lengths, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_reach_their_limit_without_stop_tokens(engines: Engines, name: str) -> None:
    engine = engines(name)
    engine._setup = replace(engine._setup, stop_token_ids=())
    output = engine.generate(make_batch(), greedy=False)
    assert output["generation_lengths"].tolist() == [6] * len(PROMPTS)
    assert output["truncated"].all()


@pytest.mark.parametrize("name", CONFIGS)
def test_stop_strings_and_limits_of_rows(engines: Engines, tiny_model: Path, name: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    plain = engines(name).generate(make_batch([0, 1, 4]), greedy=False)
    completion = sequences(plain)[0][len(PROMPTS[0]) :]
    text = tokenizer.decode(completion, skip_special_tokens=True)
    lengths = plain["generation_lengths"].tolist()
    assert len(text) > 2 < lengths[1]
    batch = make_batch([0, 1, 4])
    batch["stop_strings"] = [[text[1]], None, None]
    batch["max_new_tokens"] = torch.tensor([6, 2, 6])
    output = engines(name).generate(batch, greedy=False)
    # A token of this vocabulary is a character.
    assert output["generation_lengths"].tolist() == [text.index(text[1]) + 1, 2, lengths[2]]
    assert output["truncated"].tolist() == [False, True, bool(plain["truncated"][2])]
    for row, ids in enumerate(sequences(output)):
        assert ids == sequences(plain)[row][: len(ids)]


@pytest.mark.parametrize("name", CONFIGS)
def test_special_tokens_are_stop_strings(engines: Engines, tiny_model: Path, name: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    batch = make_batch([1] * 8)
    batch["seeds"] = torch.arange(8)
    plain = engines(name).generate(batch, greedy=False)
    completions = [ids[1:] for ids in sequences(plain)]
    bos = tokenizer.bos_token_id
    ends = [ids.index(bos) + 1 if bos in ids else len(ids) for ids in completions]
    assert ends != list(map(len, completions))
    batch["stop_strings"] = [["<bos>"]] * 8
    output = engines(name).generate(batch, greedy=False)
    assert output["generation_lengths"].tolist() == ends


@pytest.mark.parametrize("name", CONFIGS)
def test_new_weights_replace_all_old_ones(
    engines: Engines, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    engine = engines(name)
    before = sequences(engine.generate(make_batch(), greedy=True))
    other = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(0)) * 0.3)
    other.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    sent = load_file(tmp_path / "model.safetensors")
    engine.take_weights(iter(sent.items()))
    for tensor in sent.values():
        tensor.zero_()  # the next transfer overwrites its memory
    output = engine.generate(make_batch(), greedy=True)
    assert sequences(output) != before
    for row in range(len(PROMPTS)):
        end = int(output["unpadded_sequence_lengths"][row])
        actual = output["logprobs"][row, len(PROMPTS[row]) : end]
        expected = plain_logprobs(other, output, row, 1.0)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    engine.load_weights(tiny_model)
    assert sequences(engine.generate(make_batch(), greedy=True)) == before


@pytest.mark.parametrize(("name", "most"), [("hf", 2), ("megatron", 5)])
def test_few_tensors_are_kept_while_weights_arrive(
    engines: Engines, tiny_model: Path, model: Any, name: str, most: int
) -> None:
    """Megatron fuses three tensors into one: queries and keys wait for values, and so do biases."""
    live: list[weakref.ref[torch.Tensor]] = []
    counts = []

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        for key, weight in model.named_parameters():
            tensor = weight.detach().clone()
            live.append(weakref.ref(tensor))
            counts.append(sum(each() is not None for each in live))
            yield key, tensor

    engine: Any = engines(name)
    engine.take_weights(arriving())
    assert len(counts) > 10
    assert max(counts) == most
    engine.load_weights(tiny_model)


@pytest.mark.thorough
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_megatrons_ranks_sample_the_same_tokens_as_one(
    engines: Engines, tiny_model: Path, axis: str
) -> None:
    expected = engines("megatron", temperature=0.8).generate(make_batch(), greedy=False)
    setup, batch = setup_of(tiny_model, "megatron", temperature=0.8, **{axis: 2}), make_batch()

    def on_rank() -> list[list[int]]:
        backend = get_generation_backend("megatron")()
        backend.setup(setup)
        output = backend.generate(batch, greedy=False)
        return [output["output_ids"].tolist(), output["logprobs"].tolist()]

    # Of 19 tokens, one tensor-parallel rank has 10 and the other 9.
    for ids, logprobs in run_ranks(on_rank, world_size=2):
        assert ids == expected["output_ids"].tolist()
        torch.testing.assert_close(
            torch.tensor(logprobs), expected["logprobs"], atol=1e-5, rtol=1e-4
        )
