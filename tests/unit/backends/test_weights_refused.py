"""Damaged weights are refused by name on every path by which they arrive."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from nemo_rl_core.backends.generation.base import GenerationSetup, get_generation_backend
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.generation import (
    HuggingFaceGenerationConfig,
    MegatronGenerationConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.converters.export import export_model
from nemo_rl_core.converters.lora import merge_lora
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.converters.vllm_ready import vllm_ready
from nemo_rl_core.errors import ModelError
from nemo_rl_core.evals.chat import Chat
from nemo_rl_core.model_files.loading import (
    empty_model,
    finish_loading,
    load_model,
    load_scalar_model,
)
from nemo_rl_core.model_files.weights import allocate, check_folder, fill_from_folder

Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GENERATION = {
    "hf": HuggingFaceGenerationConfig,
    "megatron": MegatronGenerationConfig,
    "vllm": VllmGenerationConfig,
}


def lose(tensors: Tensors) -> None:
    del tensors[Q_PROJ]


def reshape(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:16].clone()


def add(tensors: Tensors) -> None:
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.ones(2)


def spoil(tensors: Tensors) -> None:
    tensors[Q_PROJ].view(-1)[3] = torch.nan


def overflow(tensors: Tensors) -> None:
    tensors["model.norm.weight"][0] = -torch.inf


DAMAGES: dict[Callable[[Tensors], None], str] = {
    lose: f"lacks weights(.|\n)*1 missing: {Q_PROJ}",
    reshape: rf"shapes differ(.|\n)*{Q_PROJ} \(16, 32\) for \(32, 32\)",
    add: r"does not have(.|\n)*surplus: model\.layers\.7\.self_attn\.q_proj\.weight",
    spoil: f"not finite(.|\n)*{Q_PROJ}: 1 NaN and 0 infinite of 1024",
    overflow: r"not finite(.|\n)*model\.norm\.weight: 0 NaN and 1 infinite of 32",
}


def changed(source: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fill(folder: Path) -> Any:
    model = empty_model(folder, "lm")
    allocate(model, torch.device("cpu"))
    return finish_loading(model, fill_from_folder(model, folder), folder)


def engine(backend: str, folder: Path) -> Any:
    made = get_generation_backend(backend)()
    config = GENERATION[backend](max_new_tokens=4)
    setup = GenerationSetup(
        model_folder=folder, config=config, max_model_len=32, stop_token_ids=(2,)
    )
    made.setup(setup)
    return made


def as_base(folder: Path) -> None:
    adapter = folder.with_name("adapter")
    adapter.mkdir()
    prefix = f"base_model.model.{Q_PROJ.removesuffix('.weight')}"
    halves = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(32, 2)}
    save_file(
        {f"{prefix}.{name}.weight": half for name, half in halves.items()},
        adapter / "adapter_model.safetensors",
    )
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    merge_lora(adapter, folder, folder.with_name("merged"))


ROADS: dict[str, Callable[[Path], Any]] = {
    "materialize": lambda f: materialize(
        PretrainedModel(name=str(f)), f.with_name("copy"), seed=None
    ),
    "one rank": lambda f: load_model(f, "lm"),
    "many ranks": fill,
    "a new critic": load_scalar_model,
    "transformers' engine": lambda f: engine("hf", f),
    "megatron": lambda f: engine("megatron", f),
    "chat": Chat,
    "export": lambda f: export_model(f, f.with_name("exported")),
    "a LoRA base": as_base,
    "for vLLM": lambda f: vllm_ready(f, f.with_name("ready")),
}


SLOW = {"for vLLM"}  # importing its list of architectures takes 15 s


@pytest.mark.parametrize(
    "road", [pytest.param(road, marks=[pytest.mark.thorough] * (road in SLOW)) for road in ROADS]
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, road: str, damage: Callable[[Tensors], None]
) -> None:
    folder = changed(tiny_model, tmp_path / "m", damage)
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        ROADS[road](folder)


@pytest.mark.parametrize("damage", [lose, reshape, add])
def test_vllm_does_not_start_with_a_damaged_folder(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    folder = changed(tiny_model, tmp_path / "m", damage)
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        engine("vllm", folder)


def vllm_that_reads(folder: Path) -> Any:
    """Creates a worker over a vLLM that reads all tensors; they are refused on their way to it."""
    from nemo_rl_core.backends.generation.vllm import VllmBackend

    def reload_weights(_: str, kwargs: dict[str, Any]) -> None:
        deque(kwargs["weights_iterator"], maxlen=0)

    model = empty_model(folder, "lm")
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    backend: Any = VllmBackend()
    backend._expected, backend._asleep = empty_model(folder, "lm"), ()
    backend._config = SimpleNamespace(tensor_parallel_size=1)
    backend._setup = SimpleNamespace(model_folder=folder)
    backend._llm = SimpleNamespace(
        collective_rpc=reload_weights, llm_engine=SimpleNamespace(model_executor=executor)
    )
    return backend


@pytest.fixture(scope="module")
def receivers(tiny_model: Path) -> Iterator[dict[str, Any]]:
    made = {name: engine(name, tiny_model) for name in ("hf", "megatron")}
    made["vllm"] = vllm_that_reads(tiny_model)
    yield made
    for name in ("hf", "megatron"):
        made[name].shutdown()


@pytest.mark.parametrize("backend", GENERATION)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_in_a_transfer(
    tiny_model: Path, receivers: dict[str, Any], backend: str, damage: Callable[[Tensors], None]
) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    damage(tensors)
    with pytest.raises(
        ModelError, match=rf"the trainer's weight transfer .*({DAMAGES[damage]}|{OTHERS})"
    ):
        receivers[backend].take_weights(iter(tensors.items()))


# Megatron names its weight if a rank's part has the wrong shape, and fuses three into one.
OTHERS = r"a weight with the wrong shape(.|\n)*q_proj"


def trainer(folder: Path, **words: Any) -> DTensorBackend:
    backend = DTensorBackend()
    options = {"optimizer": OptimizerConfig(), "max_tokens_per_microbatch": 64}
    backend.setup(TrainingSetup(model_folder=folder, **options, **words))
    return backend


def rewrite(path: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", DAMAGES)
def test_resumed_run_refuses_damaged_weights(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    backend = trainer(tiny_model)
    backend.save_checkpoint(tmp_path)
    rewrite(tmp_path / "model" / "model.safetensors", damage)
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        backend.load_checkpoint(tmp_path)


def test_resumed_critic_does_not_start_with_a_new_head(tiny_model: Path, tmp_path: Path) -> None:
    backend = trainer(tiny_model, head="scalar")
    backend.save_checkpoint(tmp_path)
    rewrite(tmp_path / "model" / "model.safetensors", lambda t: t.pop("score.weight"))
    with pytest.raises(ModelError, match=r"1 missing: score\.weight"):
        backend.load_checkpoint(tmp_path)
    # A new head is not created for the folder of a reward model either.
    with pytest.raises(ModelError, match=r"1 missing: score\.weight"):
        load_scalar_model(tmp_path / "model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_base_weights_of_adapters_are_refused(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    backend = trainer(tiny_model, training=DTensorTraining(lora=LoRAConfig(rank=2)))
    assert backend._adapters is not None
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        backend._adapters.replace_base(changed(tiny_model, tmp_path / "m", damage))


def test_causal_model_is_refused_as_a_reward_model_base(tiny_model: Path, tmp_path: Path) -> None:
    """A tied head hides that a reward model's head is missing; the surplus score reveals it."""
    backend = trainer(tiny_model, head="scalar")
    backend.save_checkpoint(tmp_path)
    for road in ("one rank", "many ranks", "transformers' engine", "chat"):
        with pytest.raises(ModelError, match=r"surplus: score\.weight"):
            ROADS[road](tmp_path / "model")


def test_missing_expert_is_named(tiny_model: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=19,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=16,
    )
    complete = tmp_path / "whole"
    shutil.copytree(tiny_model, complete)
    AutoModelForCausalLM.from_config(config).save_pretrained(complete)
    check_folder(empty_model(complete, "lm"), complete)
    assert export_model(complete, tmp_path / "exported") > 0
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    lacking = changed(complete, tmp_path / "lacking", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"1 missing: {name}"):
        fill(lacking)
    cut = changed(complete, tmp_path / "cut", lambda t: t.update({name: torch.ones(15, 32)}))
    with pytest.raises(ModelError, match=rf"{name} \(15, 32\) for \(16, 32\)"):
        check_folder(empty_model(cut, "lm"), cut)


def test_index_that_leads_out_of_its_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    (tmp_path / "other").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    names = load_file(tmp_path / "other" / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../other/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for road in ROADS.keys() - SLOW:
        with pytest.raises(ModelError, match=r"outside of its folder(.|\n)*\.\./other"):
            ROADS[road](folder)
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 9, None], ids=str)
def test_broken_file_is_named(tiny_model: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    for road in ("materialize", "one rank", "many ranks", "transformers' engine", "megatron"):
        with pytest.raises(ModelError, match="cannot load") as caught:
            ROADS[road](folder)
        assert str(path) in caught.value.problem
        assert caught.value.fix
