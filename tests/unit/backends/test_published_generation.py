"""A published generation config does not change what the `hf` engine samples or what is saved."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from tests.unit.backends.test_dtensor import make_backend
from tests.unit.backends.test_generation_backends import make_batch, setup_of

PUBLISHED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.6},  # Vicuna's, without do_sample
    {"do_sample": True, "temperature": 0.2, "top_k": 3, "min_p": 0.4, "typical_p": 0.3},
    {"min_new_tokens": 6},
    {"min_length": 30},
    {"max_length": 5},
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    {"num_return_sequences": 2, "do_sample": True},
    {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1},
    {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8, 9]},
    {"bad_words_ids": [[5], [6]]},
    {"sequence_bias": [[[5], -9.0]]},
    {"forced_bos_token_id": 5},
    {"forced_eos_token_id": 5},
    {"exponential_decay_length_penalty": [1, 9.0]},
    {"guidance_scale": 3.0},
    {"epsilon_cutoff": 0.3, "eta_cutoff": 0.3},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"prompt_lookup_num_tokens": 2},
    {"use_cache": False},
    {"stop_strings": ["1", "2", "3"]},
    {"max_time": 0.0},
    {"return_dict_in_generate": True, "output_scores": True},
]


def published(start: Path, folder: Path, words: dict[str, Any]) -> Path:
    shutil.copytree(start, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **words}))
    return folder


def drawn(folder: Path, stops: tuple[int, ...]) -> BatchedDataDict:
    backend = HuggingFaceBackend()
    backend.setup(replace(setup_of(folder, "hf"), stop_token_ids=stops))
    return backend.generate(make_batch(), greedy=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", PUBLISHED, ids=str)
def test_no_field_changes_the_samples(
    words: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    stops = setup_of(tiny_model, "hf").stop_token_ids
    plain = drawn(tiny_model, stops)
    completions = drawn(published(tiny_model, tmp_path / "model", words), stops)
    assert plain.keys() == completions.keys()
    for name, tensor in plain.items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, completions[name]), name


@pytest.mark.parametrize("words", PUBLISHED[:2], ids=str)
def test_model_with_a_generation_config_is_prepared_and_saved(
    words: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    folder = published(tiny_model, tmp_path / "model", words)
    materialize(PretrainedModel(name=str(folder)), tmp_path / "start", seed=0)
    assert "temperature" not in (tmp_path / "start" / "generation_config.json").read_text()
    make_backend(folder).save_checkpoint(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "model" / "generation_config.json").read_text())
    assert words.items() <= saved.items()
