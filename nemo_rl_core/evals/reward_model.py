"""Evaluation of a reward model on held-out pairs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.data.pair_files import load_pairs
from nemo_rl_core.data.pairs import pair_batch
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.evals.statistics import wilson_interval
from nemo_rl_core.models.policy import Policy

_MICROBATCH_TOKENS = 8192


@dataclass(frozen=True)
class RewardModelEvaluation:
    """Metrics and scored pairs of an evaluation.

    Attributes:
        metrics: `accuracy` (share of pairs whose chosen sequence scores higher; a tie is wrong)
            with `accuracy_low` and `accuracy_high` (Wilson), `margin` (mean difference of scores),
            `num_pairs`.
        rows: One per pair: `id`, both texts, both scores.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def evaluate_reward_model(
    model_folder: Path,
    pairs: Path,
    session: ClusterSession,
    *,
    settings: TrainerSettings,
    confidence: float,
) -> RewardModelEvaluation:
    """Scores both sequences of every pair.

    Args:
        model_folder: A sequence classifier with one label.
        pairs: A folder of pairs.
        session: The cluster of the worker.
        settings: Backend and dtype of the matrix products.
        confidence: Level of the interval.
    """
    tokenizer = load_tokenizer(model_folder)
    found = load_pairs(pairs, tokenizer)
    batch = pair_batch(found)
    longest = 2 * int(batch["input_lengths"].max())
    setup = TrainingSetup(
        model_folder=model_folder,
        optimizer=OptimizerConfig(),
        max_tokens_per_microbatch=max(_MICROBATCH_TOKENS, longest),
        training=settings.training,
        dtype=settings.dtype,
        head="scalar",
    )
    values = Policy(session, setup).get_values(batch)["values"]
    scores = values.gather(1, batch["input_lengths"][:, None] - 1).view(-1, 2)
    texts = tokenizer.batch_decode(
        [example.token_ids for pair in found for example in (pair.chosen, pair.rejected)],
        skip_special_tokens=True,
    )
    rows = [
        {
            "id": pair.id,
            "chosen": texts[2 * index],
            "rejected": texts[2 * index + 1],
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        for index, (pair, (chosen, rejected)) in enumerate(zip(found, scores.tolist(), strict=True))
    ]
    num_correct = int((scores[:, 0] > scores[:, 1]).sum())
    low, high = wilson_interval(num_correct, len(found), confidence)
    metrics = {
        "num_pairs": float(len(found)),
        "accuracy": num_correct / len(found),
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float((scores[:, 0] - scores[:, 1]).mean()),
    }
    return RewardModelEvaluation(metrics, rows)
