"""Engine settings from the options of the reference documents."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.generation import (
    HuggingFaceGenerationConfig,
    MegatronGenerationConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.data.pretrained import context_length, load_tokenizer, stop_token_ids
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.models.generation.options import read_setup


def test_engine_options_are_read_inside_or_outside_their_section(tiny_model: Path) -> None:
    engine = {"tensor_parallel_size": 2, "max_model_len": 40, "precision": "bfloat16"}
    options = {"backend": "vllm", "model_name": str(tiny_model), "top_k": None, "temperature": 0.0}
    nested = read_setup({**options, "vllm_cfg": engine}, VllmGenerationConfig)
    assert nested == read_setup({**options, **engine}, VllmGenerationConfig)
    assert nested.config == VllmGenerationConfig(tensor_parallel_size=2, temperature=0)
    assert (nested.max_model_len, nested.dtype) == (40, "bfloat16")


def test_omitted_options_come_from_the_model(tiny_model: Path) -> None:
    stop_ids = stop_token_ids(tiny_model, load_tokenizer(tiny_model))
    options: dict[str, Any] = {"model_name": str(tiny_model), "stop_token_ids": [*stop_ids, 7]}
    setup = read_setup(options, HuggingFaceGenerationConfig)
    assert setup.max_model_len == context_length(tiny_model)
    assert setup.stop_token_ids == tuple(sorted({*stop_ids, 7}))
    assert read_setup({**options, "stop_token_ids": None}, HuggingFaceGenerationConfig) == (
        read_setup({**options, "stop_token_ids": []}, HuggingFaceGenerationConfig)
    )


def test_names_of_other_libraries_are_accepted(tiny_model: Path) -> None:
    options = {"torch_dtype": torch.bfloat16, "tensor_model_parallel_size": 2}
    setup = read_setup({"model_name": str(tiny_model), **options}, MegatronGenerationConfig)
    assert (setup.dtype, setup.config.ranks_per_engine) == ("bfloat16", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"async_engine": True}, "one batch at a time"),
        ({"top_l": 3}, "unknown key 'top_l'"),
        ({"temperature": -1}, "temperature"),
        ({"precision": "float8"}, "dtype"),
        ({"backend": "hf"}, "backend"),
    ],
)
def test_options_that_do_not_fit_are_refused(tiny_model: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_setup({"model_name": str(tiny_model), **options}, VllmGenerationConfig)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        read_setup({"model_name": str(tmp_path / "none")}, VllmGenerationConfig)
