"""Model types whose values depend on lengths and switches, in the trainer and the `hf` engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import DataError, ModelError
from nemo_rl_core.models.columns import as_training_batch
from nemo_rl_core.planning.model_parts import independent_length
from tests.model_types import (
    BOUND,
    loaded,
    make_backend,
    make_batch,
    plain_logprobs,
    save_tokenizer,
    tiny_model,
)

_LONG = [40, 7, 22, 30, 5]
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [float(2 + each) for each in range(8)],
    "original_max_position_embeddings": 24,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
}
_DEPEND_ON_LENGTH = {
    "llama": {"rope_parameters": _DYNAMIC, "max_position_embeddings": 24},
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 24},
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": _LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "deepseek_v32": {"index_topk": 6},
    "doge": {"keep_window_size": 10, "sliding_window": None},
    "llama4_text": {"attention_chunk_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
}


def _saved(kind: str, folder: Path) -> None:
    tiny_model(kind, **_DEPEND_ON_LENGTH[kind]).save_pretrained(folder / "start")
    save_tokenizer(folder)


def _rows(lengths: list[int]) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 19, (length,), generator=generator).tolist() for length in lengths]
    return collate(rows, [[True] * length for length in lengths])


def _each_by_itself(folder: Path, batch: BatchedDataDict) -> torch.Tensor:
    """Returns logprobs from models that have computed nothing else before."""
    rows = [
        plain_logprobs(loaded(folder), batch.select_indices([row])) for row in range(batch.size)
    ]
    return torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _DEPEND_ON_LENGTH)
@torch.no_grad()
def test_values_that_depend_on_length_match_separate_sequences(kind: str, tmp_path: Path) -> None:
    _saved(kind, tmp_path)
    batch = _rows(_LONG)
    plain = _each_by_itself(tmp_path / "start", batch)
    backend = make_backend(tmp_path / "start", max_tokens_per_microbatch=128)
    for _ in range(2):  # `dynamic` keeps the frequencies of earlier rows
        assert (backend.get_logprobs(batch) - plain).abs().max() < BOUND
    ordinary = tiny_model(kind)
    assert independent_length(ordinary.config) != independent_length(backend._policy.model.config)


def test_pairs_with_a_sequence_that_needs_a_separate_microbatch_are_refused(tmp_path: Path) -> None:
    _saved("llama", tmp_path)
    backend = make_backend(tmp_path / "start", max_tokens_per_microbatch=128)
    pairs = {"pair_ids": torch.tensor([0, 0])}
    backend.get_logprobs(BatchedDataDict({**_rows([24, 20]), **pairs}))
    with pytest.raises(DataError, match="max_sequence_tokens: 24"):
        backend.get_logprobs(BatchedDataDict({**_rows([25, 20]), **pairs}))


def _engine(folder: Path) -> HuggingFaceBackend:
    engine = HuggingFaceBackend()
    config = HuggingFaceGenerationConfig(max_new_tokens=20)
    engine.setup(
        GenerationSetup(
            model_folder=folder / "start",
            config=config,
            max_model_len=64,
            stop_token_ids=(2,),
            dtype="float32",
        )
    )
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bart", "recurrent_gemma", "falcon_h1"])
def test_engine_completes_rows_independently_of_neighbors(kind: str, tmp_path: Path) -> None:
    """Cases: frequencies by length, positions that count padding, state that padding changes."""
    tiny_model(kind, **_DEPEND_ON_LENGTH.get(kind, {})).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    engine = _engine(tmp_path)
    batch = BatchedDataDict({**_rows([5, 12, 3, 1]), "seeds": torch.arange(4)})
    together = engine.generate(batch, greedy=False)
    for row in range(4):
        separate = engine.generate(batch.select_indices([row]), greedy=False)
        length = int(separate["unpadded_sequence_lengths"][0])
        assert torch.equal(together["output_ids"][row, :length], separate["output_ids"][0])
        difference = together["logprobs"][row, :length] - separate["logprobs"][0]
        assert difference.abs().max() < BOUND


def test_rows_that_end_early_do_not_change_longer_ones(tmp_path: Path) -> None:
    _saved("llama", tmp_path)
    engine = _engine(tmp_path)
    limits = {"seeds": torch.arange(2), "max_new_tokens": torch.tensor([2, 20])}
    together = engine.generate(BatchedDataDict({**_rows([20, 4]), **limits}), greedy=False)
    row = BatchedDataDict({**_rows([20, 4]), **limits}).select_indices([1])
    separate = engine.generate(row, greedy=False)
    assert torch.equal(together["output_ids"][1, :24], separate["output_ids"][0])
    difference = together["logprobs"][1, :24] - separate["logprobs"][0]
    assert difference.abs().max() < BOUND


def test_engine_that_computes_different_values_is_refused(tmp_path: Path) -> None:
    tiny_model("roberta").save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="RobertaForCausalLM's forward pass"):
        _engine(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        ("llama", {"return_dict": False}),
        ("bart", {"return_dict": None}),
        ("llama", {"output_hidden_states": True, "output_attentions": True}),
        ("llama", {"use_cache": False, "torchscript": True, "pad_token_id": None}),
        ("llama", {"num_labels": 3, "problem_type": "regression", "is_decoder": False}),
        ("llama", {"is_encoder_decoder": True}),
        ("llama", {"attn_implementation": "flash_attention_2"}),
        ("llama", {"_attn_implementation": "flash_attention_2", "dtype": "bfloat16"}),
        ("mixtral", {"output_router_logits": True}),
        ("bert", {"chunk_size_feed_forward": 2}),
    ],
)
def test_switches_of_the_output_format_do_not_change_values(
    kind: str, switches: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    path = tmp_path / "start" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | switches))
    batch = BatchedDataDict({**_rows([5, 12, 3, 1]), "seeds": torch.arange(4)})
    completions = as_training_batch(_engine(tmp_path).generate(batch, greedy=False))
    for each in (make_batch(), completions):
        with torch.no_grad():
            expected = plain_logprobs(model, each)
        torch.testing.assert_close(
            make_backend(tmp_path / "start", max_tokens_per_microbatch=64).get_logprobs(each),
            expected,
            rtol=0,
            atol=BOUND,
        )
    output = _engine(tmp_path).generate(batch, greedy=False)["logprobs"][:, 1:]
    torch.testing.assert_close(output, expected, rtol=0, atol=BOUND)
