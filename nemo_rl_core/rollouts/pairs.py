"""Preference pairs out of a model's own completions."""

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.loader import load_prompts
from nemo_rl_core.data.pairs import PreferencePair, pairs_from_rollouts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.sampler import Sampler


@dataclass(frozen=True)
class SampledPairs:
    """What was found.

    Attributes:
        pairs: At most one a prompt, in the order of the prompts.
        num_prompts: How many prompts were sampled from.
        num_tokens: Tokens generated.
        peak_memory_gib: The most memory that the engine has held.
        num_failed_rollouts: Completions that could not be scored; no pair holds one.
    """

    pairs: list[PreferencePair]
    num_prompts: int
    num_tokens: int
    peak_memory_gib: float
    num_failed_rollouts: int


def sample_pairs(
    model_folder: Path,
    prompts: Path,
    session: ClusterSession,
    *,
    settings: RolloutSettings,
    num_generations_per_prompt: int,
    margin: float,
    iteration: int,
) -> SampledPairs:
    """Completes and scores every prompt, and sets the best completion against the worst.

    Args:
        model_folder: The policy.
        prompts: A data set folder.
        session: Where the engine runs.
        settings: How completions are made and scored.
        num_generations_per_prompt: Completions to choose from.
        margin: By more than how much their rewards must differ.
        iteration: Part of every request's seed, so that the next one draws others.

    Raises:
        DataError: If no prompt gives a pair.
    """
    rows = load_prompts(prompts, load_tokenizer(model_folder))
    with Sampler(session, settings, model_folder) as sampler:
        rollouts = sampler.score(
            sampler.engine.run(
                rows, num_generations_per_prompt=num_generations_per_prompt, step=iteration
            )
        )
        peak_memory_gib = sampler.generation.peak_memory_gib()
    pairs = pairs_from_rollouts(rollouts, margin=margin)
    if not pairs:
        raise DataError(
            "no prompt gives a preference pair: the completions of each have the same reward",
            expected=f"rewards that differ by more than {margin} for some prompt",
            got=f"{len(rollouts)} completions of {len(rows)} prompts",
            fix="sample more completions a prompt, or begin with a model that is sometimes right",
        )
    num_tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
    num_failed = len(rollouts) - len(valid_rollouts(rollouts))
    return SampledPairs(pairs, len(rows), num_tokens, peak_memory_gib, num_failed)
