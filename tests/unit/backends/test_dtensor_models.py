"""Tensor parallelism of several model types, and of scalar heads, compared with one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.mesh import check_sizes
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    apply_tensor_parallel,
    check_tensor_parallel,
)
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError
from tests.model_types import tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}
LENGTHS = [7, 3, 6, 2]
PLAN = {
    "*.[qkv]_proj": "colwise",
    "*.o_proj": "rowwise",
    "*.gate_proj": "colwise",
    "*.up_proj": "colwise",
    "*.down_proj": "rowwise",
}


def make_model(kind: str, folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(4, 19, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[True] * n for n in LENGTHS])


def mean_value(
    values: torch.Tensor,
    batch: BatchedDataDict,
    *,
    global_valid_seqs: torch.Tensor,
    global_valid_tokens: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (values[:, 0] - 1).square().sum() / global_valid_seqs
    return loss, {"loss": loss.detach()}


def two_steps(folder: Path, axes: dict[str, Any], head: str) -> dict[str, Any]:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            training=DTensorTraining(**axes),
            max_tokens_per_microbatch=16,
            head=head,
        )
    )
    loss = mean_value if head == "scalar" else NLLLoss()
    read = backend.get_values if head == "scalar" else backend.get_logprobs
    steps = [backend.train_step(make_batch(), loss) for _ in range(2)]
    return {
        "steps": [(step["loss"], step["grad_norm"]) for step in steps],
        "after": read(make_batch()),
        "weights": dict(backend.named_weights()),
    }


@pytest.mark.thorough
def test_two_tensor_ranks_agree_with_one(tiny_model: Path, tmp_path: Path) -> None:
    axes: dict[str, Any] = {"tensor_parallel_size": 2}
    split = {**axes, "sequence_parallel": True}
    folders = {kind: make_model(kind, tmp_path / kind, tiny_model) for kind in CONFIGS}
    cases = [
        (folders["llama"], axes, "lm"),
        (folders["llama"], {**split, "tensor_parallel_plan": PLAN}, "lm"),
        (folders["qwen3"], split, "lm"),
        (folders["gemma3"], split, "lm"),
        (folders["llama"], split, "scalar"),
        (folders["qwen3"], {}, "scalar"),
    ]
    cases_on_ranks = run_ranks(
        lambda: [two_steps(*case) for case in cases], world_size=2, timeout_seconds=900.0
    )
    for number, (folder, _, head) in enumerate(cases):
        single = two_steps(folder, {}, head)
        for results in cases_on_ranks:
            actual = results[number]
            for (loss, norm), (want_loss, want_norm) in zip(
                actual["steps"], single["steps"], strict=True
            ):
                assert loss == pytest.approx(want_loss, rel=1e-5), (folder.name, head)
                assert norm == pytest.approx(want_norm, rel=1e-4), (folder.name, head)
            torch.testing.assert_close(actual["after"], single["after"], rtol=1e-4, atol=1e-5)
            for name, weight in single["weights"].items():
                torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-4, atol=1e-5)


def test_indivisible_heads_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **{**SIZES, "num_key_value_heads": 1}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_key_value_heads = 1"):
        check_tensor_parallel(tmp_path, DTensorTraining(tensor_parallel_size=2))


@pytest.mark.parametrize("kind", ["diffllama", "granite_swa", "gpt_oss", "gpt2", "stablelm"])
def test_weights_without_a_style_are_refused(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with pytest.raises(ConfigError, match="has no plan to split"):
        apply_tensor_parallel(model, DTensorTraining(tensor_parallel_size=2), mesh=None)


def refusal_of_setup(folder: Path) -> str:
    linear = {
        "*_proj": "colwise",
        "*.down_proj": "rowwise",
    }  # `o_proj` only gets part of its inputs
    axes = {"tensor_parallel_size": 2, "tensor_parallel_plan": linear}
    with pytest.raises(ConfigError) as caught:
        two_steps(folder, axes, "lm")
    return str(caught.value)


@pytest.mark.slow
def test_plan_that_splits_attention_wrongly_is_refused(tiny_model: Path) -> None:
    for message in run_ranks(refusal_of_setup, tiny_model, world_size=2):
        assert "no plan that fits Qwen2ForCausalLM" in message
        assert "set tensor_parallel_size to 1" in message


def test_ranks_that_do_not_fill_the_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 4 ranks"):
        check_sizes(DTensorTraining(tensor_parallel_size=2, data_parallel_replicas=2), 6)
    check_sizes(DTensorTraining(tensor_parallel_size=2, data_parallel_replicas=2), 8)
