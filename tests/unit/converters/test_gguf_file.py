"""GGUF files, read back by transformers and by the package `gguf`."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from nemo_rl_core.config.model import TextModelFromConfig
from nemo_rl_core.converters.gguf_file import _SPLITS, write_gguf
from nemo_rl_core.converters.materialize import materialize, read_gguf
from nemo_rl_core.errors import ModelError, StoreError
from workflows.cli import group

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TEXT = "Hello there, 123 wörlds — it's  fine\n\n<end> 蛇"
SPLITTERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_SPLITS["qwen2"][0]["pattern"]["Regex"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def tokenizer_of(splitter: str) -> Any:
    """Byte-level BPE with merges that it learnt."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(SPLITTERS[splitter])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["hello there it's fine here " * 5, "the then 12 123 worlds"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<pad>",
        chat_template="{{ messages[0]['content'] }}",
    )


def saved(folder: Path, config: Any, tokenizer: Any) -> Path:
    config.vocab_size = len(tokenizer) + 4  # as many published models: rows without a token
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=5e4),
    "qwen2": lambda: Qwen2Config(**SIZES, rms_norm_eps=1e-5),
}


@pytest.mark.parametrize("splitter", list(SPLITTERS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_model_reads_back_bitwise_identical(tmp_path: Path, name: str, splitter: str) -> None:
    folder = saved(tmp_path / "model", CONFIGS[name](), tokenizer_of(splitter))
    count = write_gguf(folder, tmp_path / "it.gguf")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["it.gguf"]
    ours = AutoModelForCausalLM.from_pretrained(folder)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="it.gguf", dtype=torch.float32)
    expected, found = ours.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(ours(ids).logits, back(ids).logits)
    reader = gguf.GGUFReader(tmp_path / "it.gguf")
    assert len(reader.tensors) == count
    output = {key: field.contents() for key, field in reader.fields.items()}
    assert output["tokenizer.ggml.pre"] == splitter
    assert len(output["tokenizer.ggml.tokens"]) == ours.config.vocab_size
    tokenizer = tokenizer_of(splitter)
    assert output["tokenizer.ggml.tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(
        range(len(tokenizer))
    )
    assert output["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert output["tokenizer.chat_template"] == tokenizer.chat_template
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    assert output["tokenizer.ggml.merges"] == [" ".join(pair) for pair in state["model"]["merges"]]
    assert len(state["model"]["merges"]) > 20


def test_a_model_is_read_from_a_folder_that_has_only_a_gguf_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", CONFIGS["llama"](), tokenizer_of("smollm"))
    write_gguf(folder, tmp_path / "it.gguf")
    model, tokenizer = read_gguf(tmp_path / "it.gguf", source_name="the model")
    expected, found = AutoModelForCausalLM.from_pretrained(folder).state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert tokenizer.eos_token == "<end>"


def test_the_small_text_model_and_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    materialize(TextModelFromConfig(hidden_size=32, num_heads=2), folder, seed=0)
    result = CliRunner().invoke(group, ["export", str(folder), "--gguf", str(tmp_path / "a.gguf")])
    assert result.exit_code == 0, result.output
    assert result.stdout == f'wrote {tmp_path / "a.gguf"}: 26 tensors of a "qwen2" in F32\n'
    ours = AutoTokenizer.from_pretrained(folder)
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    text = TEXT.replace("<end>", "")
    # transformers itself reads no start token from the file, as llama.cpp does.
    assert back.encode(text, add_special_tokens=False) == ours.encode(
        text, add_special_tokens=False
    )
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert (back.eos_token, back.bos_token) == ("<eos>", "<bos>")
    assert back.chat_template == ours.chat_template


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_two_bytes(tmp_path: Path, dtype: Any) -> None:
    folder = saved(tmp_path / "model", CONFIGS["llama"](), tokenizer_of("gpt-2"))
    write_gguf(folder, tmp_path / "it.gguf", dtype=dtype)
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="it.gguf", dtype=torch.float32
    ).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        kept = tensor.to(getattr(torch, dtype)).float() if tensor.dim() > 1 else tensor
        assert torch.equal(back[name], kept), name


def test_unsupported_models_are_refused_for_gguf(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer of 'model' cannot be written to GGUF") as e:
        write_gguf(tiny_model, tmp_path / "it.gguf")
    assert e.value.got == "WordLevel, Split"
    assert "text_from_config" in str(e.value.fix)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    config = LlamaConfig(**SIZES, rope_parameters=scaled)
    folder = saved(tmp_path / "model", config, tokenizer_of("gpt-2"))
    with pytest.raises(ModelError, match="scaled position encoding"):
        write_gguf(folder, tmp_path / "it.gguf")
    (tmp_path / "it.gguf").write_bytes(b"mine")
    with pytest.raises(StoreError, match=r"it\.gguf exists"):
        write_gguf(folder, tmp_path / "it.gguf")
    assert (tmp_path / "it.gguf").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.gguf", "model"]
