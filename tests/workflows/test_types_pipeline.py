"""SFT, GRPO and export of tiny models of different structures with the real command."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.types import Rollout
from tests.commands import RECIPE, run
from tests.model_types import (
    BOUND,
    loaded,
    make_backend,
    make_batch,
    plain_logprobs,
    save_tokenizer,
    tiny_model,
)

NUM_STEPS = 3
CHANGES: dict[str, Any] = {
    "environment": {"kind": "function", "target": "tests.workflows.rewards:digits"},
    "sft": {"num_steps": NUM_STEPS, "global_batch_size": 8, "learning_rate": 3e-3},
    "grpo": {
        "num_iterations": 1,
        "num_steps_per_iteration": NUM_STEPS,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "learning_rate": 3e-3,
    },
    "evaluation": {"num_samples_per_prompt": 1},
}
WIDE_HEADS: dict[str, dict[str, Any]] = {"gpt2": {"n_embd": 128}, "gemma2": {"head_dim": 32}}
"""Heads with 32 columns, as vLLM's CPU kernels require."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("qwen3_next", "hf"),
        pytest.param("gpt2", "hf", marks=pytest.mark.thorough),
        pytest.param("gemma2", "hf", marks=pytest.mark.thorough),
        pytest.param("gpt_oss", "hf", marks=pytest.mark.thorough),
        pytest.param("nemotron_h", "hf", marks=pytest.mark.thorough),
        pytest.param("gpt2", "vllm", marks=pytest.mark.thorough),
        pytest.param("gemma2", "vllm", marks=pytest.mark.thorough),
    ],
)
def test_a_model_is_trained_and_exported_for_transformers(
    kind: str, engine: str, tmp_path: Path
) -> None:
    changes = WIDE_HEADS[kind] if engine == "vllm" else {}
    tiny_model(kind, **changes).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    generation = {"max_new_tokens": 4, "backend": engine}
    model = {"name": str(tmp_path / "start")}
    recipe = {**RECIPE, **CHANGES, "model": model, "generation": generation}
    finished = run(recipe, tmp_path / "store")
    assert finished.exit_code == 0, finished.output[-3000:]
    supervised, reinforced = (
        finished.artifact(stage) for stage in ("train_sft", "grpo_iteration 1")
    )

    steps = finished.metrics("grpo_iteration 1")
    assert [step["global_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=BOUND)
        assert step["kl_generation_trainer"] < 1e-8
        assert step["grad_norm"] > 0
    assert any(step["reward_std"] > 0 for step in steps)

    start, after_sft, after_grpo, exported = (
        loaded(folder)
        for folder in (
            tmp_path / "start",
            supervised / "model",
            reinforced / "model",
            Path(finished.value("model:")),
        )
    )
    # The first step samples from the supervised model.
    rollouts = RolloutRecords(reinforced / "rollouts").load(1)
    assert len(rollouts) == 16
    for rollout in rollouts:
        recorded = torch.tensor(rollout.completion.logprobs)
        torch.testing.assert_close(
            completion_logprobs(after_sft, rollout), recorded, rtol=0, atol=BOUND
        )

    assert unchanged(start, after_sft) == []
    assert unchanged(after_sft, after_grpo) == []
    assert unchanged(after_grpo, exported) == [name for name, _ in exported.named_parameters()]
    batch = make_batch()
    trainer = make_backend(Path(finished.value("model:")))
    with torch.no_grad():
        expected = plain_logprobs(exported, batch)
    torch.testing.assert_close(trainer.get_logprobs(batch), expected, rtol=0, atol=BOUND)


def completion_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """Returns `[L]` logprobs of a completion by a transformers model."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
    masks = [False] * len(prompt) + [True] * len(completion)
    with torch.no_grad():
        logprobs = plain_logprobs(model, collate([[*prompt, *completion]], [masks]))
    return logprobs[0, len(prompt) - 1 :]


def unchanged(before: Any, after: Any) -> list[str]:
    """Returns names of equal parameters of two models."""
    pairs = zip(before.named_parameters(), after.named_parameters(), strict=True)
    return [name for (name, one), (_, other) in pairs if torch.equal(one, other)]
