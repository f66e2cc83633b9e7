"""A tokenizer in a model folder is read as it was saved, for any model config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2Config

from nemo_rl_core.data.pretrained import (
    context_length,
    load_tokenizer,
    sampling_length,
    stop_token_ids,
)
from nemo_rl_core.data.tokenizer import CHARACTERS, build_arithmetic_tokenizer
from nemo_rl_core.errors import ModelError

BUILT = build_arithmetic_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder from a config, without weights."""
    made = tmp_path_factory.mktemp("saved")
    Qwen2Config(vocab_size=len(BUILT)).save_pretrained(made)
    BUILT.save_pretrained(made)
    return made


def test_spaces_and_unknown_characters_are_kept_beside_a_qwen2_config(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    assert loaded.encode("1 + 2=") == [1, 5, 18, 14, 18, 6, 17]
    assert loaded.encode("a1\n") == [1, 3, 5, 3]
    assert loaded.decode([5, 18, 14, 18, 6, 17]) == "1 + 2="


def test_it_is_the_same_after_it_was_loaded_and_saved_again(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(folder).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.fixture(scope="module")
def auto(folder: Path) -> Any:
    """Loads a tokenizer like vLLM and other users of an exported model."""
    return AutoTokenizer.from_pretrained(folder)


def test_auto_tokenizer_misreads(auto: Any) -> None:
    """Shows the bug that the two adjacent tests cover; if this fails, remove them."""
    assert type(auto).__name__ == "Qwen2Tokenizer"


@given(text=st.text(alphabet=CHARACTERS, max_size=30))
def test_auto_tokenizer_sees_the_same_ids(auto: Any, text: str) -> None:
    ids = BUILT.encode(text)
    assert auto.encode(text) == ids
    assert auto.decode([*ids, BUILT.eos_token_id], skip_special_tokens=True) == text


def test_settings_that_are_not_json_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X"})[:-1])
    with pytest.raises(ModelError, match="no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"x"'])
def test_a_config_that_is_not_json_is_named(folder: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(content)
    for read in (context_length, lambda f: stop_token_ids(f, BUILT)):
        with pytest.raises(ModelError, match="cannot be read") as caught:
            read(tmp_path / "m")
        assert str(path) in caught.value.problem


_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}


@pytest.mark.parametrize(
    ("config", "context", "sampled"),
    [
        ({"model_type": "llama", "max_position_embeddings": 64}, 64, 64),
        ({"model_type": "gpt2", "n_positions": 48}, 48, 48),
        ({"model_type": "mpt", "max_seq_len": 40}, 40, 40),
        ({"model_type": "bloom"}, None, None),
        # Positions begin after the padding token's id.
        ({"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1}, 64, 64),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}},
            256,
            256,
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            256,
            64,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            128,
            128,
        ),
        ({"model_type": "moshi", "max_position_embeddings": 64, "sliding_window": 48}, 48, 48),
        (
            {
                "model_type": "phi3",
                "hidden_size": 1024,
                "num_attention_heads": 8,
                "max_position_embeddings": 256,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", **_FACTORS},
            },
            256,
            64,
        ),
    ],
)
def test_lengths_follow_from_the_scaling_of_positions(
    config: dict[str, Any], context: int | None, sampled: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert context_length(tmp_path) == context
    assert sampling_length(tmp_path) == sampled


def test_longrope_with_one_set_of_factors_does_not_limit_rollouts(tmp_path: Path) -> None:
    factors = {"short_factor": [4.0] * 64, "long_factor": [4.0] * 64}
    config = {
        "model_type": "phi3",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", **factors},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sampling_length(tmp_path) == 256


def test_a_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other", "max_position_embeddings": 8}')
    with pytest.raises(ModelError, match="does not describe a model that transformers supports"):
        context_length(tmp_path)
