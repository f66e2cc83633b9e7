"""Evaluation of a reward model on held-out pairs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.data.pairs import load_pairs, pair_batch
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.evals.comparison import pair_metrics
from nemo_rl_core.models.policy import Policy

_MICROBATCH_TOKENS = 8192


@dataclass(frozen=True)
class RewardModelEvaluation:
    """Metrics, and one row per pair: `id`, both texts and both scores."""

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
    """Scores both sequences of every pair with a sequence classifier with one label."""
    tokenizer = load_tokenizer(model_folder)
    loaded = load_pairs(pairs, tokenizer)
    batch = pair_batch(loaded)
    longest = 2 * int(batch["input_lengths"].max())
    setup = TrainingSetup(
        model_folder=model_folder,
        optimizer=OptimizerConfig(),
        max_tokens_per_microbatch=max(_MICROBATCH_TOKENS, longest),
        training=settings.training,
        dtype=settings.dtype,
        isolation=settings.isolation.training,
        head="scalar",
    )
    values = Policy(session, setup).get_values(batch)["values"]
    scores = values.gather(1, batch["input_lengths"][:, None] - 1).view(-1, 2)
    texts = tokenizer.batch_decode(
        [example.token_ids for pair in loaded for example in (pair.chosen, pair.rejected)],
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
        for index, (pair, (chosen, rejected)) in enumerate(
            zip(loaded, scores.tolist(), strict=True)
        )
    ]
    metrics = pair_metrics(rows, confidence=confidence)
    metrics["margin"] = float((scores[:, 0] - scores[:, 1]).mean())  # float32, like the scores
    return RewardModelEvaluation(metrics, rows)
