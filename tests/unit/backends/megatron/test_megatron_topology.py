"""Ranks, groups and the redirected CUDA assumptions."""

import subprocess
import sys

import pytest
import torch

from nemo_rl_core.backends.training.megatron.families import FAMILIES
from nemo_rl_core.backends.training.megatron.model import (
    padded_vocabulary_size,
    refuse_indivisible,
)
from nemo_rl_core.config.megatron_types import MEGATRON_TYPES
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError, ModelError, WorkerError

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def qwen3_moe(**changes: object):
    from transformers import Qwen3MoeConfig

    sizes: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def test_vocabulary_is_padded_to_the_tensor_ranks() -> None:
    assert [padded_vocabulary_size(size, 4) for size in (48, 49, 51, 52)] == [48, 52, 52, 52]


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads cannot be divided"),
        ({"tensor_parallel_size": 4}, "2 key/value heads cannot be divided"),
        ({"pipeline_parallel_size": 3}, "4 layers cannot be divided"),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 4}, "4 layers cannot be divided"),
        ({"expert_parallel_size": 3}, "4 experts cannot be divided"),
        ({"tensor_parallel_size": 2}, "need sequence parallelism"),
    ],
)
def test_indivisible_layout_is_refused(training, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_indivisible(FAMILIES["qwen3_moe"], qwen3_moe(), MegatronTraining(**training))


def test_expert_parallelism_is_refused_for_a_dense_model() -> None:
    with pytest.raises(ConfigError, match="without experts"):
        refuse_indivisible(FAMILIES["llama"], qwen3_moe(), MegatronTraining(expert_parallel_size=2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, r"llama, mixtral, qwen2, qwen3, qwen3_moe(.|\n)*got: gpt2"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen3", "hidden_act": "gelu"}, "hidden_act=gelu"),
        (
            {
                "model_type": "qwen2",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "rope_type=yarn",
        ),
    ],
)
def test_unsupported_architecture_is_named(tmp_path, config, message: str) -> None:
    import json

    from nemo_rl_core.backends.training.megatron.families import family_of

    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        family_of(tmp_path)


def test_plans_support_the_types_that_the_backend_builds() -> None:
    assert FAMILIES.keys() == MEGATRON_TYPES


@pytest.mark.thorough
@needs_no_cuda
def test_ranks_are_in_project_order_and_layouts_can_change() -> None:
    def positions() -> dict[str, object]:
        from megatron.core import parallel_state as state

        from nemo_rl_core.backends.training.megatron.cpu import run_on_cpu_where_cuda_is_absent
        from nemo_rl_core.backends.training.megatron.topology import (
            initialize_topology,
            tear_down_topology,
        )

        run_on_cpu_where_cuda_is_absent()
        run_on_cpu_where_cuda_is_absent()  # a second call changes nothing
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        initialize_topology(MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=2))
        dense = (
            state.get_pipeline_model_parallel_rank(),
            state.get_data_parallel_rank(),
            state.get_tensor_model_parallel_rank(),
        )
        initialize_topology(MegatronTraining(expert_parallel_size=2), seed=7)
        sampled = torch.rand(2).tolist()
        initialize_topology(MegatronTraining(expert_parallel_size=2), seed=7)
        with get_cuda_rng_tracker().fork():
            sampled_again = torch.rand(2).tolist()
        experts = state.get_data_parallel_rank(), state.get_expert_model_parallel_rank()
        tear_down_topology()
        tear_down_topology()
        try:
            initialize_topology(MegatronTraining(tensor_parallel_size=3))
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        ones = torch.ones(2)
        return {
            "dense": dense,
            "experts": experts,
            "same samples": sampled == sampled_again,
            "refusal": refusal,
            "device": str(torch.cuda.current_device()),
            "literal": schedules.torch.zeros([], device="cuda").device.type,
            "type": ones.type(),
            "cast": ones.type(torch.int64).dtype,
            "itself": ones.cuda() is ones,
        }

    results = run_ranks(positions, world_size=4)
    assert [actual["dense"] for actual in results] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert [actual["experts"] for actual in results] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for actual in results:
        assert actual["same samples"]
        assert "a multiple of 3 ranks" in str(actual["refusal"])
        assert actual["device"] == actual["literal"] == "cpu"
        assert actual["type"] == "torch.cuda.FloatTensor"
        assert actual["cast"] is torch.int64
        assert actual["itself"]


@pytest.mark.thorough
def test_folder_without_a_weight_is_refused(tmp_path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(qwen3_moe(vocab_size=16)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def load() -> None:
        from nemo_rl_core.backends.training.megatron.model import build_model
        from nemo_rl_core.backends.training.megatron.topology import initialize_topology
        from nemo_rl_core.backends.training.megatron.weights import load_hf_weights

        initialize_topology(MegatronTraining())
        load_hf_weights(build_model(tmp_path, MegatronTraining()), tmp_path)

    with pytest.raises(WorkerError, match=r"lacks weights(.|\n)*layers.2.mlp.experts.3.up_proj"):
        run_ranks(load, world_size=1)


@pytest.mark.slow
@needs_no_cuda
@pytest.mark.parametrize(
    "module", ["backends.training.megatron.backend", "backends.generation.megatron"]
)
def test_small_functions_do_not_need_a_compiler(module: str) -> None:
    # In a separate process, since the first import decides.
    program = f"""
import nemo_rl_core.{module}
from megatron.core.fusions.fused_bias_swiglu import swiglu
assert not hasattr(swiglu, "_torchdynamo_orig_callable")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
