"""Weights read by slices are bitwise identical to fully loaded ones and need less memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.lora import Adapters
from nemo_rl_core.checkpoints.tensors import load_tensors, save_tensors
from nemo_rl_core.checkpoints.weights import as_published
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ModelError, StoreError
from nemo_rl_core.model_files.loading import (
    Head,
    empty_model,
    finish_loading,
    load_model,
)
from nemo_rl_core.model_files.weights import allocate, check_folder, fill_from_folder

SIZES: dict[str, Any] = {
    "vocab_size": 19,  # two ranks do not divide it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    # 7.9 MB in float32, in tensors of at most 0.3 MB.
    "large": Qwen2Config(
        **{**SIZES, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    ),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.max_new_tokens = 7
        # Several files and an index, except for the large one.
        size = "1GB" if name == "large" else "10KB"
        model.save_pretrained(root / name, max_shard_size=size)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(root / name)
    return {name: root / name for name in CONFIGS}


def filled(folder: Path, head: Head) -> Any:
    model = empty_model(folder, head)
    assert all(parameter.is_meta for parameter in model.parameters())
    allocate(model, CPU)
    return finish_loading(model, fill_from_folder(model, folder), folder)


@pytest.mark.parametrize(
    ("kind", "head"), [("tied", "lm"), ("untied", "lm"), ("experts", "lm"), ("tied", "scalar")]
)
def test_filled_model_equals_the_loaded_one(
    folders: dict[str, Path], tmp_path: Path, kind: str, head: Head
) -> None:
    loaded, filled_model = load_model(folders[kind], head), filled(folders[kind], head)
    expected, actual = loaded.state_dict(), filled_model.state_dict()
    assert list(expected) == list(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert [n for n, _ in loaded.named_parameters()] == [
        n for n, _ in filled_model.named_parameters()
    ]
    for (name, buffer), (other, same) in zip(
        loaded.named_buffers(), filled_model.named_buffers(), strict=True
    ):
        assert name == other
        assert torch.equal(buffer, same)
    # It is also saved like the loaded model.
    published = [
        dict(as_published(model, model.state_dict().items())) for model in (loaded, filled_model)
    ]
    assert published[0].keys() == published[1].keys()
    for name, model in (("loaded", loaded), ("filled", filled_model)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "loaded").iterdir():
        assert file.read_bytes() == (tmp_path / "filled" / file.name).read_bytes(), file.name


def in_fp8(folder: Path, target: Path) -> Path:
    """Saves the model with projections in FP8, in blocks of 8 x 16 with one scale each."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.index.json"))
    tensors = {}
    for file in sorted(target.glob("*.safetensors")):
        tensors |= load_tensors(file)
        file.unlink()
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            blocks = tensor.reshape(rows // 8, 8, columns // 16, 16)
            scales = blocks.abs().amax(dim=(1, 3)) / 448
            rounded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name] = rounded.reshape(rows, columns)
            tensors[f"{name}_scale_inv"] = scales
    save_tensors(target / "model.safetensors", tensors, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_fp8_weights_read_by_slices_equal_those_of_transformers(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = in_fp8(folders[kind], tmp_path / "fp8")
    loaded, filled_model = load_model(folder, "lm"), filled(folder, "lm")
    expected, actual = loaded.state_dict(), filled_model.state_dict()
    assert list(expected) == list(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(actual[name], load_model(folders[kind], "lm").get_parameter(name))
    for model in (loaded, filled_model):  # so that it is not saved as quantized
        assert not hasattr(model.config, "quantization_config")


def test_other_quantization_methods_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = in_fp8(folders["tied"], tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"cannot be read here(.|\n)*quant_method: awq"):
        filled(folder, "lm")


def test_backends_without_fp8_support_refuse_it_by_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Megatron and vLLM check a folder against the model before they read it."""
    folder = in_fp8(folders["tied"], tmp_path / "fp8")
    with pytest.raises(ModelError, match=r"'fp8' cannot be read here(.|\n)*quant_method: fp8"):
        check_folder(empty_model(folder, "lm"), folder)


def test_fp8_weights_are_dequantized_with_a_gpu_present(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_fp8(folders["tied"], tmp_path / "fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = load_model(folder, "lm")
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}


def test_adapters_of_an_empty_model_equal_those_of_the_loaded_one(
    folders: dict[str, Path],
) -> None:
    trained = []
    for make in (load_model, empty_model):
        torch.manual_seed(3)
        model = make(folders["tied"], "lm")
        adapters = Adapters(model, LoRAConfig(rank=4), base_folder=folders["tied"])
        allocate(model, CPU)
        assert fill_from_folder(model, folders["tied"]) == set()
        trained.append((adapters.trained, model.state_dict()))
    for expected, actual in zip(*trained, strict=True):
        assert list(expected) == list(actual)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert any(values.any() for name, values in trained[0][0].items() if "lora_A" in name)


def damaged(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Saves the model in one file, with a change."""
    model = load_model(folder, "lm")
    model.config.save_pretrained(target)
    tensors = dict(model.state_dict())
    change(tensors)
    save_tensors(target / "model.safetensors", tensors, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(33)}),
            r"1 of another shape: model.norm.weight \(33,\) for \(32,\)",
        ),
        (lambda t: t.update({"model.x": torch.ones(1)}), "1 surplus: model.x"),
        (
            lambda t: t.update({"model.norm.weight": torch.tensor([torch.inf] * 32)}),
            "not finite.*model.norm.weight: 0 NaN and 32 infinite of 32",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(19, 32)}), "ties weights that differ"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folders: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = damaged(folders["tied"], tmp_path, change)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        filled(folder, "lm")


def test_folder_without_safetensors_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders["tied"] / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        filled(tmp_path, "lm")


def test_missing_base_of_adapters_is_reported(folders: dict[str, Path], tmp_path: Path) -> None:
    adapters = Adapters(
        load_model(folders["tied"], "lm"), LoRAConfig(rank=4), base_folder=folders["tied"]
    )
    with pytest.raises(StoreError, match="trainer/base"):
        adapters.has_same_base(tmp_path / "base")


def peak_allocated_bytes(function: Callable[[], Any], *, mapped_bytes: int) -> int:
    """Returns the peak memory that torch allocates on a function's thread while it runs.

    Args:
        function: The function to measure.
        mapped_bytes: Size of the file that it maps, which the profiler counts as an allocation.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    assert kept is not None
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    current = most = 0
    for _, num_bytes in changes:
        if abs(num_bytes) != mapped_bytes:
            current += num_bytes
            most = max(most, current)
    return most


def weights_of(folder: Path, head: Head, axes: dict[str, Any]) -> dict[str, torch.Tensor]:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(),
            training=DTensorTraining(**axes),
            max_tokens_per_microbatch=64,
            head=head,
        )
    )
    weights = {name: weight.clone() for name, weight in backend.named_weights()}
    backend.shutdown()
    return weights


def peak_of_setup(folder: Path, axes: dict[str, Any]) -> int:
    """Returns the peak memory of creating and filling a rank's shards."""
    from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
    from nemo_rl_core.backends.training.dtensor.parallelize import parallelize

    training = DTensorTraining(**axes)
    mesh = join_mesh(training)

    def load() -> Any:
        model = parallelize(empty_model(folder, "lm"), training, mesh, dtype="float32")
        return finish_loading(model, fill_from_folder(model, folder), folder)

    mapped_bytes = (folder / "model.safetensors").stat().st_size
    return peak_allocated_bytes(load, mapped_bytes=mapped_bytes)


CASES: dict[int, list[tuple[str, Head, dict[str, Any]]]] = {
    2: [
        ("tied", "lm", {}),
        ("untied", "lm", {"cpu_offload": True}),
        ("experts", "lm", {}),
        ("tied", "scalar", {}),
        ("tied", "lm", {"lora": LoRAConfig(rank=4)}),
        ("tied", "lm", {"tensor_parallel_size": 2}),
    ],
    4: [
        ("tied", "lm", {"data_parallel_replicas": 2}),
        ("untied", "lm", {"tensor_parallel_size": 2}),
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_equal_fully_loaded_weights(folders: dict[str, Path], num_ranks: int) -> None:
    cases = [(folders[kind], head, axes) for kind, head, axes in CASES[num_ranks]]
    by_rank = run_ranks(lambda: [weights_of(*case) for case in cases], world_size=num_ranks)
    for number, (folder, head, axes) in enumerate(cases):
        alone = {name: axes[name] for name in axes if name == "lora"}
        expected = weights_of(folder, head, alone)
        for results in by_rank:
            assert list(results[number]) == list(expected), axes
            for name, weight in expected.items():
                assert torch.equal(results[number][name], weight), (axes, name)


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [{}, {"tensor_parallel_size": 2}], ids=["FSDP 2", "TP 2"])
def test_rank_with_half_a_model_never_allocates_much_more(
    folders: dict[str, Path], axes: dict[str, Any]
) -> None:
    """The peak is 0.500 to 0.501 of the bytes of the full model, as measured."""
    folder = folders["large"]
    tensors = load_tensors(folder / "model.safetensors").values()
    full_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for peak in run_ranks(peak_of_setup, folder, axes, world_size=2):
        assert 0.5 <= peak / full_bytes < 0.6
