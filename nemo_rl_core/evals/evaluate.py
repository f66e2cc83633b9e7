"""A checkpoint measured on held-out prompts: greedy accuracy, and pass@k from samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.loader import load_prompts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.evals.statistics import pass_at_k, wilson_interval
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.types import Prompt, Rollout

FULL_SCORE = 1.0
"""A completion counts as correct when it gets this; partial credit counts in `mean_reward`."""


@dataclass(frozen=True)
class EvaluationResult:
    """What was measured.

    Attributes:
        metrics: `greedy_accuracy` with `greedy_accuracy_low` and `_high` (Wilson), `mean_reward`
            of the greedy completions, and `pass_at_1` and `pass_at_<n>` from samples.
        rows: One a completion: `prompt_id`, `mode` (greedy or sampled), `prompt`, `completion`,
            `answer`, `reward`, `correct`, `truncated`.
        num_tokens: Tokens generated.
        peak_memory_gib: The most memory that the engine has held.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    num_tokens: int
    peak_memory_gib: float


def evaluate(
    model_folder: Path,
    data: Path,
    session: ClusterSession,
    *,
    config: EvaluationConfig,
    settings: RolloutSettings,
) -> EvaluationResult:
    """Measures the model in `model_folder` on every prompt of `data`."""
    prompts = load_prompts(data, load_tokenizer(model_folder))
    with Sampler(session, settings, model_folder) as sampler:
        engine = sampler.engine
        greedy = _greedy(sampler, prompts)
        sampled = sampler.score(
            engine.run(prompts, num_generations_per_prompt=config.num_samples_per_prompt, step=0)
        )
        peak_memory_gib = sampler.generation.peak_memory_gib()
    return EvaluationResult(
        metrics=_metrics(greedy, sampled, config),
        rows=[*_rows(greedy, "greedy"), *_rows(sampled, "sampled")],
        num_tokens=sum(len(r.completion.token_ids) for r in [*greedy, *sampled]),
        peak_memory_gib=peak_memory_gib,
    )


def greedy_metrics(sampler: Sampler, prompts: list[Prompt]) -> dict[str, float]:
    """`accuracy`, `mean_reward` and `truncated_fraction` of the most likely completions."""
    greedy = _greedy(sampler, prompts)
    return {
        "accuracy": sum(_is_correct(rollout) for rollout in greedy) / len(greedy),
        "mean_reward": sum(rollout.reward or 0.0 for rollout in greedy) / len(greedy),
        "truncated_fraction": sum(r.completion.truncated for r in greedy) / len(greedy),
    }


def _greedy(sampler: Sampler, prompts: list[Prompt]) -> list[Rollout]:
    return sampler.score(
        sampler.engine.run(prompts, num_generations_per_prompt=1, step=0, greedy=True)
    )


def _metrics(
    greedy: list[Rollout], sampled: list[Rollout], config: EvaluationConfig
) -> dict[str, float]:
    num_correct = sum(_is_correct(rollout) for rollout in greedy)
    low, high = wilson_interval(num_correct, len(greedy), config.confidence)
    n = config.num_samples_per_prompt
    groups = [sampled[start : start + n] for start in range(0, len(sampled), n)]
    counts = [sum(_is_correct(rollout) for rollout in group) for group in groups]
    return {
        "num_prompts": float(len(greedy)),
        "greedy_accuracy": num_correct / len(greedy),
        "greedy_accuracy_low": low,
        "greedy_accuracy_high": high,
        "mean_reward": sum(rollout.reward or 0.0 for rollout in greedy) / len(greedy),
        "truncated_fraction": sum(r.completion.truncated for r in greedy) / len(greedy),
        **{
            f"pass_at_{k}": sum(pass_at_k(n, c, k) for c in counts) / len(counts)
            for k in sorted({1, n})
        },
    }


def _is_correct(rollout: Rollout) -> bool:
    return rollout.reward is not None and rollout.reward >= FULL_SCORE


def _rows(rollouts: list[Rollout], mode: str) -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": rollout.prompt.id,
            "mode": mode,
            "prompt": rollout.prompt.text,
            "completion": rollout.text,
            "answer": rollout.prompt.answer,
            "reward": rollout.reward,
            "correct": _is_correct(rollout),
            "truncated": rollout.completion.truncated,
        }
        for rollout in rollouts
    ]


def greedy_scores(rows: list[dict[str, Any]]) -> dict[str, float]:
    """1 or 0 for each prompt, by its id: what a paired comparison of two checkpoints takes."""
    return {str(row["prompt_id"]): float(row["correct"]) for row in rows if row["mode"] == "greedy"}
