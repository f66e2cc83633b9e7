"""Broken model folders: each is refused before any weight is read, by file, with the fix."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_core.converters.folder_check import check_model_folder
from nemo_rl_core.converters.materialize import check_pretrained
from nemo_rl_core.errors import ModelError

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
SETTINGS = "tokenizer_config.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
Breaks = Callable[[Path], Any]


def says(name: str, **changes: Any) -> Breaks:
    """Changes keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return change


def has_layers(number: int) -> Breaks:
    return says(CONFIG, num_hidden_layers=number, layer_types=None)


def holds(name: str, content: bytes) -> Breaks:
    return lambda folder: (folder / name).write_bytes(content)


def lacks(name: str) -> Breaks:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Breaks:
    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return write


def in_shards(weight_map: dict[str, str] | None) -> Breaks:
    """Moves the weights into one shard and writes an index."""

    def write(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        result = dict.fromkeys(names, "model-00001-of-00002.safetensors") | (weight_map or {})
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": result}))

    return write


SECOND = {QUERY: "model-00002-of-00002.safetensors"}
BROKEN: dict[str, tuple[Breaks, list[str]]] = {
    "no config": (lacks(CONFIG), ["has no config.json"]),
    "config is empty": (holds(CONFIG, b""), [CONFIG, "a JSON object"]),
    "config is no JSON": (holds(CONFIG, b"{model_type: qwen2}"), [CONFIG, "a JSON object"]),
    "config is cut": (holds(CONFIG, b'{"model_type": "qw'), [CONFIG, "a JSON object"]),
    "config is a list": (holds(CONFIG, b"[1, 2]"), [CONFIG, "a JSON object"]),
    "config is binary": (holds(CONFIG, b"\xff\xfe\x00"), [CONFIG, "a JSON object"]),
    "config is empty JSON": (holds(CONFIG, b"{}"), [CONFIG, "model_type"]),
    "an unknown type": (says(CONFIG, model_type="qwen99"), [CONFIG, "qwen99"]),
    "no type": (says(CONFIG, model_type=None), [CONFIG]),
    "zero heads": (says(CONFIG, num_attention_heads=0), [CONFIG, "num_attention_heads: 0"]),
    "heads that do not divide": (says(CONFIG, num_attention_heads=5), [CONFIG]),
    "a size as text": (says(CONFIG, hidden_size="wide"), [CONFIG, "hidden_size: 'wide'"]),
    "a negative size": (says(CONFIG, vocab_size=-1), [CONFIG, "vocab_size: -1"]),
    "a vocabulary too small": (says(CONFIG, vocab_size=7), [CONFIG, "ids below 7"]),
    "a vocabulary too large": (says(CONFIG, vocab_size=99), [CONFIG, WEIGHTS, "embed_tokens"]),
    "another width": (says(CONFIG, hidden_size=64), [CONFIG, WEIGHTS, "of another shape"]),
    "more layers": (has_layers(3), [CONFIG, WEIGHTS, "layers.2"]),
    "fewer layers": (has_layers(1), [CONFIG, WEIGHTS, "layers.1"]),
    "layers of fewer types": (says(CONFIG, num_hidden_layers=3), [CONFIG, "layer_types"]),
    "no weights": (lacks(WEIGHTS), [f"has no {WEIGHTS}"]),
    "weights are empty": (holds(WEIGHTS, b""), [WEIGHTS]),
    "weights are cut": (cut, [WEIGHTS]),
    "weights are no weights": (holds(WEIGHTS, b"hello" * 99), [WEIGHTS]),
    "a header without an end": (holds(WEIGHTS, struct.pack("<Q", 2**62) + b"{}"), [WEIGHTS]),
    "a header that is no JSON": (holds(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"), [WEIGHTS]),
    "a weight is missing": (weights(lambda w: w.pop(QUERY)), [WEIGHTS, QUERY, "1 missing"]),
    "a surplus weight": (
        weights(lambda w: w.update({"model.extra": torch.zeros(2)})), [WEIGHTS, "model.extra"],
    ),
    "another shape": (
        weights(lambda w: w.update({QUERY: torch.zeros(3, 3)})), [WEIGHTS, QUERY, "(3, 3)"],
    ),
    "a missing shard": (in_shards(SECOND), ["has no model-00002-of-00002.safetensors"]),
    "a shard elsewhere": (in_shards({QUERY: "../a.safetensors"}), ["outside of its folder"]),
    "an index that is no JSON": (
        lambda f: (in_shards(None)(f), holds(f"{WEIGHTS}.index.json", b"{")(f)),
        [f"{WEIGHTS}.index.json"],
    ),
    "no tokenizer": (lacks(TOKENIZER), ["has no vocabulary", TOKENIZER]),
    "no settings of the tokenizer": (lacks(SETTINGS), [f"has no {SETTINGS}"]),
    "tokenizer is empty": (holds(TOKENIZER, b""), [TOKENIZER, "a JSON object"]),
    "tokenizer is no JSON": (holds(TOKENIZER, b"hello"), [TOKENIZER, "a JSON object"]),
    "tokenizer is of nothing": (holds(TOKENIZER, b"{}"), [TOKENIZER]),
    "settings are no JSON": (holds(SETTINGS, b"{"), [SETTINGS, "a JSON object"]),
    "an unknown tokenizer": (says(SETTINGS, tokenizer_class="Nobodys"), []),
    "generation settings are no JSON": (
        holds("generation_config.json", b"{"), ["generation_config.json", "a JSON object"],
    ),
    "a template that cannot be read": (
        holds("chat_template.jinja", b"{% for m in messages %}"), ["chat template", "endfor"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_folder_is_refused_by_file(tiny_model: Path, tmp_path: Path, name: str) -> None:
    breaks, words = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    breaks(folder)
    if not words:  # nothing that a load would notice
        check_model_folder(folder)
        return
    with pytest.raises(ModelError) as caught:
        check_pretrained(str(folder))
    message = str(caught.value)
    for word in words:
        assert word in message
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.fix
    assert "model" in message
    assert len(message.splitlines()) <= 4
    assert len(message) < 1200


def test_complete_folders_pass(tiny_model: Path, tmp_path: Path) -> None:
    check_model_folder(tiny_model)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    in_shards(None)(folder)
    check_model_folder(folder)
