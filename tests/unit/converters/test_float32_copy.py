"""A published model in float32, tensor by tensor: the files that transformers would write."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl_core.checkpoints import tensors as tensors_module
from nemo_rl_core.checkpoints.weight_files import stored_tensors
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.converters import float32_copy
from nemo_rl_core.converters.float32_copy import copy_in_float32
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}


def published(name: str, folder: Path, dtype: torch.dtype, **options: Any) -> Path:
    torch.manual_seed(1)
    MODELS[name]().to(dtype).save_pretrained(folder, **options)
    return folder


def by_transformers(source: Path, target: Path, **options: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(target, **options)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(stored_tensors(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = published(name, tmp_path / "source", dtype, max_shard_size="4KB")
    count = copy_in_float32(source, tmp_path / "copy", source_name="it")
    assert count == MODELS[name]().num_parameters()
    full = by_transformers(source, tmp_path / "full")
    assert contents(tmp_path / "copy") == contents(full)


@pytest.mark.parametrize("name", MODELS)
def test_several_files_are_divided_like_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_copy, "_MAX_FILE_SIZE", "8KB")
    source = published(name, tmp_path / "source", torch.bfloat16)
    copy_in_float32(source, tmp_path / "copy", source_name="it")
    full = by_transformers(source, tmp_path / "full", max_shard_size="8KB")
    result = contents(tmp_path / "copy")
    assert len(result) >= 5  # two files, their index, two configs
    if name == "experts":  # of a layer, which transformers keeps in one file as views of one tensor
        copied, expected = tensors_of(tmp_path / "copy"), tensors_of(full)
        assert copied.keys() == expected.keys()
        assert all(torch.equal(copied[each], expected[each]) for each in expected)
    else:
        assert result == contents(full)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = weakref.WeakSet[torch.UntypedStorage]()
    most: list[int] = []
    write = tensors_module.write_float32

    def counting(path: Path, shapes: Any, read: Callable[[str], torch.Tensor]) -> None:
        def counted(name: str) -> torch.Tensor:
            tensor = read(name)
            alive.add(tensor.untyped_storage())
            most.append(len(alive))
            return tensor

        write(path, shapes, counted)

    assert float32_copy.write_float32 is write
    monkeypatch.setattr(float32_copy, "write_float32", counting)
    source = published("experts", tmp_path / "source", torch.bfloat16)
    copy_in_float32(source, tmp_path / "copy", source_name="it")
    assert len(most) > 40
    assert max(most) <= 2  # this one, and the one before until it is replaced


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = float("nan")


@pytest.mark.parametrize("damage", [drop, reshape, spoil])
def test_damage_is_refused_as_by_a_load(
    damage: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    source = published("untied", tmp_path / "source", torch.float32)
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the model 'm'") as refused:
        copy_in_float32(source, tmp_path / "copy", source_name="the model 'm'")
    assert "model.norm.weight" in str(refused.value)


def as_quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_another_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_integers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [as_quantized, as_pickle, as_another_head, as_integers])
def test_models_that_only_transformers_can_read_are_left_to_it(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    source = published("tied", tmp_path / "source", torch.float32)
    change(source)
    assert copy_in_float32(source, tmp_path / "copy", source_name="it") is None
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from nemo_rl_core.converters import materialize as module

    results: list[str] = []
    load = module.load_pretrained

    def counted(kind: Any, source: Any, **options: Any) -> Any:
        results.append(str(source))
        return load(kind, source, **options)

    monkeypatch.setattr(module, "load_pretrained", counted)
    return results


def test_stage_never_loads_a_full_model(tiny_model: Path, tmp_path: Path, loads: list[str]) -> None:
    materialize(PretrainedModel(name=str(tiny_model)), tmp_path / "copy", seed=None)
    assert loads == []
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "copy" / file).read_bytes() == (tiny_model / file).read_bytes()
    shutil.copytree(tiny_model, tmp_path / "two heads")
    as_another_head(tmp_path / "two heads")
    materialize(PretrainedModel(name=str(tmp_path / "two heads")), tmp_path / "full", seed=None)
    assert loads == [str(tmp_path / "two heads")]
