"""Training of adapters on a quantized base with Ray: engines get the same values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.algorithms import GRPOTrainer, SFTTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models import HuggingFacePolicy
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry.metrics import MetricsFile

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
ROWS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in PROMPTS]


@pytest.mark.parametrize(
    ("precision", "backend"),
    [("8bit", "hf"), ("4bit", "vllm"), pytest.param("8bit", "vllm", marks=pytest.mark.thorough)],
)
def test_engines_compute_with_the_dequantized_weights(
    precision: str, backend: str, session: ClusterSession, tiny_model: Path
) -> None:
    trainer = GRPOTrainer.from_pretrained(
        tiny_model,
        cluster={"num_threads": 1},
        training={"lora": {"rank": 4}, "weights": precision},
        generation={"backend": backend, "max_new_tokens": 6},
        max_prompt_tokens=16,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        num_steps_per_iteration=2,
        learning_rate=1e-2,
    )
    result = trainer.fit(PROMPTS, reward_fn=lambda response: float(len(response)))
    reports = MetricsFile(result.folder / "metrics.jsonl").read()
    for report in reports:
        # The gate compares engine and trainer, and in float32 on a CPU they differ by rounding.
        assert report.metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    assert reports[0].metrics["kl"] == pytest.approx(0, abs=1e-6)  # to the quantized base
    assert Manifest.read(result.folder).config["training"]["weights"] == precision


def test_sft_learns_on_a_base_of_four_bits(session: ClusterSession, tiny_model: Path) -> None:
    trainer = SFTTrainer.from_pretrained(
        tiny_model,
        cluster={"num_threads": 1},
        training={"lora": {"rank": 8, "alpha": 32.0}, "weights": "4bit"},
        num_steps=30,
        global_batch_size=15,
        learning_rate=1e-2,
    )
    losses = [step["loss"] for step in trainer.fit(ROWS).metrics]
    assert losses[-1] < 0.6 * losses[0]


def test_a_policy_of_the_documents_loads_in_8_or_4_bits(
    session: ClusterSession, tiny_model: Path
) -> None:
    batch: Any = BatchedDataDict(
        {"input_ids": torch.tensor([[5, 6, 7, 8]]), "input_lengths": torch.tensor([4])}
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for option in ("load_in_8bit", "load_in_4bit"):
        policy = HuggingFacePolicy(str(tiny_model), session, max_new_tokens=4, **{option: True})
        assert policy.generate(batch, greedy=True)["generation_lengths"].tolist() == [4]
        sent = dict(policy.policy.state_dict())
        name = "model.layers.0.mlp.down_proj.weight"
        error = (sent[name] - plain.state_dict()[name]).abs().max()
        assert 0 < error < (0.002 if option == "load_in_8bit" else 0.04)
        policy.shutdown()
