"""Defaults of a recipe with GPUs: the table of tests/gpu/README.md."""

import torch

from nemo_rl_core.backends.training.optimizers import build_optimizer
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.models.validation.proof import proof_bounds
from tasks.recipes.grpo import GRPORecipe


def test_a_recipe_with_gpus_leaves_the_rest_to_these_defaults() -> None:
    validated = GRPORecipe.model_validate(
        {"model": {"name": "org/model"}, "cluster": {"shape": "node_8gpu"}}
    )
    assert validated.cluster.num_workers == validated.generation.num_engines == 8
    assert validated.model.dtype == "bfloat16"
    training, engine = validated.training, validated.generation
    assert isinstance(training, DTensorTraining)
    assert isinstance(engine, VllmGenerationConfig)
    for setting in (
        "attention",
        "activation_checkpointing",
        "gradient_sync",
        "data_parallel_replicas",
        "deterministic",
    ):
        assert getattr(training, setting) == "auto", setting
    assert not training.compile
    assert training.offload_for_generation == "none"
    # The precision of float32 does not apply to other types.
    assert training.float32_matmul_precision == engine.float32_matmul_precision == "highest"
    assert engine.gpu_memory_utilization == 0.5
    assert not engine.enforce_eager  # so that vLLM has CUDA graphs
    assert engine.placement == "colocated"


def test_experts_on_gpus_have_a_wider_gate() -> None:
    gate = GRPORecipe.model_validate({"recipe": "grpo_moe_30b_a3b_2nodes"}).grpo.gate
    dense = GRPORecipe.model_validate({"recipe": "grpo_7b_8gpu"}).grpo.gate
    assert dense == GateConfig()
    proof = proof_bounds(dense, dtype="bfloat16", is_quantized=False)
    assert gate.max_token_mult_prob_error == proof.max_token_mult_prob_error > 1.05


def test_moments_are_updated_by_the_fused_kernel() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([("weight", weight)], OptimizerConfig())
    assert all(group["fused"] for group in optimizer.param_groups)
