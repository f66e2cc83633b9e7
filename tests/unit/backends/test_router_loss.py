"""The load-balancing loss of experts, compared with transformers' loss of each sequence."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.dtensor.router_loss import load_balancing_losses
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import ConfigError
from tasks.local_run.preflight import preflight
from tasks.recipes.common import PipelineRecipe
from tests.model_types import (
    BOUND,
    backend_steps,
    loaded,
    make_backend,
    make_batch,
    plain_logprobs,
    plain_router_loss,
    plain_steps,
    save_tokenizer,
    tiny_model,
)


def test_load_balancing_loss_by_hand() -> None:
    # Two layers and two sequences: tokens 0 and 2, and token 1; token 3 is padding.
    always_first = torch.tensor([[0.6, 0.4]] * 4).log()
    one_each = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.0001, 0.9999]]).log()
    losses = load_balancing_losses(
        [always_first, one_each], torch.tensor([0, 1, 0, 2]), num_sequences=2, top_k=1
    )
    # Sequence 0: expert 0 in 3 of 4 choices, its probabilities 0.6, 0.6, 0.9, 0.2.
    # Sequence 1: expert 0 in 1 of 2 choices, its probabilities 0.6 and 0.3.
    by_hand = [
        2 * (3 / 4 * 2.3 / 4 + 1 / 4 * 1.7 / 4),
        2 * (1 / 2 * 0.9 / 2 + 1 / 2 * 1.1 / 2),
    ]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "jetmoe"])
def test_untrained_balancing_loss_is_logged(
    kind: str, asks: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(kind)
    model.config.output_router_logits = asks
    model.save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    backend, batch = make_backend(tmp_path / "start"), make_batch()
    assert ("load-balancing loss of experts" in caplog.text) is asks
    loss = -plain_logprobs(model, batch).sum() / batch["token_mask"].sum()
    trained = backend.train_step(batch, NLLLoss())["loss"]
    assert trained == pytest.approx(loss.item(), rel=1e-5)


def start_with_experts(kind: str, tmp_path: Path) -> Path:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    return tmp_path / "start"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [("mixtral", False), ("mixtral", True), ("gpt_oss", True), ("jetmoe", False)],
)
def test_load_balancing_loss_matches_transformers_for_each_sequence(
    kind: str, recomputes: bool, tmp_path: Path
) -> None:
    start, batch = start_with_experts(kind, tmp_path), make_batch()
    training = DTensorTraining(router_aux_loss_coef=0.5, activation_checkpointing=recomputes)
    backend = make_backend(start, 1e-2, training=training)
    expected = plain_steps(loaded(start), batch, 1e-2, router_aux_loss_coef=0.5)
    assert backend_steps(backend, batch).error(expected) < BOUND
    balance = plain_router_loss(loaded(start), batch).item()
    metrics = make_backend(start, training=training).train_step(batch, NLLLoss())
    assert metrics["router_aux_loss"] == pytest.approx(balance, rel=1e-5)


def test_masked_sequences_have_no_load_balancing_loss(tmp_path: Path) -> None:
    start, batch = start_with_experts("mixtral", tmp_path), make_batch()
    batch["sample_mask"] = torch.tensor([1.0, 0, 1, 0, 0, 1])
    backend = make_backend(start, training=DTensorTraining(router_aux_loss_coef=0.1))
    actual = backend.train_step(batch, NLLLoss())["router_aux_loss"]
    counted = batch.select_indices([0, 2, 5])
    assert actual == pytest.approx(plain_router_loss(loaded(start), counted).item(), rel=1e-5)


KINDS = ["mixtral", "gpt_oss"]


def _second_steps(folder: Path) -> list[dict[str, float]]:
    """Returns metrics of the second step on this rank's part; rank 1 has one sequence."""
    rows = [0, 1, 2, 3, 4] if rank() == 0 else [5]
    training = DTensorTraining(router_aux_loss_coef=0.5)
    results = []
    for kind in KINDS:
        start = folder / kind / "start"
        backend = make_backend(start, 1e-2, training=training, max_tokens_per_microbatch=12)
        for _ in range(2):
            metrics = backend.train_step(make_batch().select_indices(rows), NLLLoss())
        results.append(metrics)
    return results


@pytest.mark.slow
def test_ranks_with_unequal_microbatches_share_one_load_balancing_loss(tmp_path: Path) -> None:
    starts = [start_with_experts(kind, tmp_path / kind) for kind in KINDS]
    steps = [
        plain_steps(loaded(start), make_batch(), 1e-2, router_aux_loss_coef=0.5) for start in starts
    ]
    for actual in run_ranks(_second_steps, tmp_path, world_size=2):
        for metrics, expected in zip(actual, steps, strict=True):
            assert metrics["loss"] == pytest.approx(expected.losses[1], rel=1e-5)
            assert metrics["grad_norm"] == pytest.approx(expected.grad_norms[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "doge", "llama4_text", "jamba"])
def test_models_without_a_load_balancing_loss_are_refused_before_the_run(
    kind: str, tmp_path: Path
) -> None:
    training = DTensorTraining(router_aux_loss_coef=0.1, lora=LoRAConfig())
    start = start_with_experts(kind, tmp_path)
    recipe = PipelineRecipe(model={"kind": "pretrained", "name": str(start)}, training=training)
    with pytest.raises(ConfigError, match="load-balancing loss"):
        preflight({"config": recipe})
    with pytest.raises(ConfigError, match="load-balancing loss"):
        make_backend(start, training=training)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("jamba", {"num_experts": 1}),
    ],
)
def test_type_with_experts_may_have_no_loss(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(kind, **changes).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="has no load-balancing loss"):
        make_backend(tmp_path / "start", training=DTensorTraining(router_aux_loss_coef=0.1))


def test_step_without_unmasked_sequences_changes_nothing(tmp_path: Path) -> None:
    start, batch = start_with_experts("mixtral", tmp_path), make_batch()
    batch["sample_mask"] = torch.zeros(len(batch["input_lengths"]))
    backend = make_backend(start, training=DTensorTraining(router_aux_loss_coef=0.1))
    metrics = backend.train_step(batch, NLLLoss())
    assert (metrics["router_aux_loss"], metrics["grad_norm"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size: 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 1"),
        ({"share_prefixes": True, "compile": True}, "share_prefixes: false and compile: false"),
    ],
)
def test_the_load_balancing_loss_refuses_split_sequences(other: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=f"set {fix}, or remove router_aux_loss_coef"):
        DTensorTraining(router_aux_loss_coef=0.1, **other)
