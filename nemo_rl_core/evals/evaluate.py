"""Evaluation of a checkpoint on held-out prompts: greedy accuracy, pass@k and cons@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig, grader_version
from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.evals.consensus import GetVotes, voting
from nemo_rl_core.evals.metrics import category_metrics, category_of, evaluation_metrics, is_correct
from nemo_rl_core.rollouts.prompts import load_sampled_prompts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.telemetry.waiting import waiting
from nemo_rl_core.types import Prompt, Rollout


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of all prompts and by category, and one row (see `eval_rows`) per completion."""

    metrics: dict[str, float]
    categories: dict[str, dict[str, float]]
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
    """Evaluates the model in `model_folder` on every prompt of `data`."""
    prompts = load_sampled_prompts(
        data,
        load_tokenizer(model_folder),
        settings.environment,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    refuse_incomplete_rows(prompts, settings.local_environment, name="validation")
    with Sampler(session, settings, model_folder) as sampler:
        engine = sampler.engine
        with waiting(f"generating {len(prompts):,} greedy completions"):
            greedy = RemoteRollouts.of(sampler.score(greedy_rollouts(sampler, prompts)))
        sampled = RemoteRollouts.of([])
        if num_samples := config.num_samples_per_prompt:
            with waiting(f"generating {num_samples * len(prompts):,} sampled completions"):
                drawn = engine.run(prompts, num_generations_per_prompt=num_samples, step=0)
                sampled = RemoteRollouts.of(sampler.score(drawn))
        peak_memory_gib = sampler.generation.peak_memory_gib()
    num_tokens = sum(len(r.completion.token_ids) for r in [*greedy, *sampled])
    greedy, sampled = greedy.episodes(), sampled.episodes()
    environment = settings.environment
    with voting(environment) as get_votes:
        return EvaluationResult(
            metrics=evaluation_metrics(greedy, sampled, config=config, get_votes=get_votes),
            categories=category_metrics(greedy, sampled, config=config, get_votes=get_votes),
            rows=[
                row
                for mode, drawn in (("greedy", greedy), ("sampled", sampled))
                for row in eval_rows(
                    drawn,
                    mode,
                    category=config.category,
                    get_votes=get_votes,
                    environment=environment,
                )
            ],
            num_tokens=num_tokens,
            peak_memory_gib=peak_memory_gib,
        )


def greedy_rollouts(sampler: Sampler, prompts: Sequence[Prompt]) -> Sequence[Rollout]:
    """Returns an unscored greedy completion of each prompt."""
    return sampler.engine.run(prompts, num_generations_per_prompt=1, step=0, greedy=True)


def eval_rows(
    rollouts: Sequence[Rollout],
    mode: str,
    *,
    category: str,
    get_votes: GetVotes,
    environment: EnvironmentConfig,
) -> list[dict[str, Any]]:
    """Returns one row per scored rollout; rollouts of a prompt come in the order of sampling."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    votes = {prompt: iter(enumerate(get_votes(group))) for prompt, group in groups.items()}
    rows = []
    for rollout in rollouts:
        sample, vote = next(votes[rollout.prompt.id])
        rows.append(
            {
                "prompt_id": rollout.prompt.id,
                "mode": mode,
                "sample": sample,
                "category": category_of(rollout, category),
                "prompt": rollout.prompt.text,
                "completion": rollout.text,
                "answer": rollout.prompt.answer,
                "extracted": vote,
                "reward": rollout.reward,
                "correct": is_correct(rollout),
                "truncated": rollout.completion.truncated,
                "error": rollout.error,
                "grader_version": grader_version(environment, rollout.prompt.task),
            }
        )
    return rows
