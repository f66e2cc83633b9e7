"""TRL's trainers and ours give equal weights for the same rows, model and optimizer.

A step takes all rows, so their order does not matter. Equal losses of five steps and equal weights
afterwards imply equal templates, masks, end-of-sequence tokens, losses and gradients.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_rl_core.algorithms.dpo import config as dpo
from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from nemo_rl_core.algorithms.reward_model.loss import PreferenceLossFn
from nemo_rl_core.algorithms.sft.data import sft_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.data.chat import conversation_example, preference_example
from nemo_rl_core.data.pairs import PreferencePair, pair_batch
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.model_files.loading import load_scalar_model

NUM_STEPS = 5
# This epsilon is so large that rounding errors in a near-zero gradient move no weight.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.0, adam_epsilon=1e-3)
SUMS = [(1, 2), (10, 20), (33, 4), (5, 66), (7, 7)]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "chosen": [{"role": "assistant", "content": str(a + b)}],
        "rejected": [{"role": "assistant", "content": str(a + b + 95)}],
    }
    for a, b in SUMS
]


@dataclass(frozen=True)
class Run:
    """Trains five steps; returns the loss before each, and the weights after the last."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture
def ours() -> Callable[..., Run]:
    def train(
        folder: Path,
        prepare: Callable[[DTensorBackend], BatchedDataDict],
        loss_fn: Any,
        **setup: Any,
    ) -> Run:
        backend = DTensorBackend()
        backend.setup(
            TrainingSetup(
                model_folder=folder, optimizer=OPTIMIZER, max_tokens_per_microbatch=64, **setup
            )
        )
        batch = prepare(backend)
        losses = [backend.train_step(batch, loss_fn)["loss"] for _ in range(NUM_STEPS)]
        return Run(losses, {name: weight.clone() for name, weight in backend.named_weights()})

    return train


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[..., Run]:
    def train(kind: str, model: Any, folder: Path, rows: list[Any], **options: Any) -> Run:
        import trl

        arguments = getattr(trl, f"{kind}Config")(
            output_dir=str(tmp_path / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            max_steps=NUM_STEPS,
            lr_scheduler_type="constant",
            learning_rate=OPTIMIZER.learning_rate,
            adam_beta1=OPTIMIZER.adam_beta1,
            adam_beta2=OPTIMIZER.adam_beta2,
            adam_epsilon=OPTIMIZER.adam_epsilon,
            max_grad_norm=OPTIMIZER.max_grad_norm,
            weight_decay=OPTIMIZER.weight_decay,
            **options,
        )
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=load_tokenizer(folder),
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return Run(losses, dict(model.state_dict()))

    return train


def assert_equal(one: Run, other: Run) -> None:
    # The losses begin near 1, so a loss near 0 has the same absolute precision.
    assert one.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-6 * one.losses[0])
    assert one.losses[-1] < one.losses[0]
    assert one.weights
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-4, atol=1e-6, msg=name)


def pairs(folder: Path) -> list[PreferencePair]:
    tokenizer = load_tokenizer(folder)
    stored = [{name: json.dumps(turns) for name, turns in row.items()} for row in PAIRS]
    return [PreferencePair("", *preference_example(tokenizer, row)) for row in stored]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (dpo.SigmoidLoss(beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
        (dpo.HingeLoss(beta=0.3), {"loss_type": ["hinge"], "beta": 0.3}),
        (dpo.IPOLoss(beta=0.5), {"loss_type": ["ipo"], "beta": 0.5}),
        (
            dpo.RobustLoss(beta=0.3, label_smoothing=0.2),
            {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.2},
        ),
        (dpo.LengthNormalizedLoss(beta=2.0), {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_dpo(
    tiny_model: Path,
    ours: Callable[..., Run],
    theirs: Callable[..., Run],
    loss: dpo.PreferenceLoss,
    options: dict[str, Any],
) -> None:
    def prepare(backend: DTensorBackend) -> BatchedDataDict:
        batch = pair_batch(pairs(tiny_model))
        batch["reference_logprobs"] = backend.get_reference_logprobs(batch)
        return batch

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert_equal(
        ours(tiny_model, prepare, DPOLossFn(loss), reference_folder=tiny_model),
        theirs("DPO", model, tiny_model, PAIRS, **options),
    )


@pytest.mark.slow
def test_sft_on_the_assistants_turn(
    tiny_model: Path, ours: Callable[..., Run], theirs: Callable[..., Run]
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    examples = [conversation_example(tokenizer, row["prompt"] + row["chosen"]) for row in PAIRS]
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert_equal(
        ours(tiny_model, lambda _: sft_batch(examples), NLLLoss()),
        theirs("SFT", model, tiny_model, rows),
    )


@pytest.mark.slow
def test_reward_model(
    tiny_model: Path, tmp_path: Path, ours: Callable[..., Run], theirs: Callable[..., Run]
) -> None:
    # A head of zeros hides the decoder from the first gradient, so both start from a random one.
    scalar = load_scalar_model(tiny_model)
    torch.nn.init.normal_(scalar.score.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    scalar.save_pretrained(tmp_path / "scalar")
    load_tokenizer(tiny_model).save_pretrained(tmp_path / "scalar")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scalar", num_labels=1, dtype=torch.float32
    )
    conversations = [
        {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in PAIRS
    ]
    assert_equal(
        ours(
            tmp_path / "scalar",
            lambda _: pair_batch(pairs(tiny_model)),
            PreferenceLossFn(),
            head="scalar",
        ),
        theirs("Reward", model, tmp_path / "scalar", conversations),
    )
