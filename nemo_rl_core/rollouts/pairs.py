"""Preference pairs from completions of a model."""

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.loader import load_prompts
from nemo_rl_core.data.pairs import PreferencePair, pairs_from_rollouts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.sampler import Sampler


@dataclass(frozen=True)
class SampledPairs:
    """Preference pairs and numbers about how they were sampled.

    Attributes:
        num_failed_rollouts: Number of completions that could not be scored; no pair has one.
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
    """Completes and scores every prompt, and pairs the best completion with the worst.

    Args:
        margin: The rewards of a pair must differ by more than this.
        iteration: Part of every request's seed, so that the completions of iterations differ.
    """
    rows = load_prompts(prompts, load_tokenizer(model_folder))
    with Sampler(session, settings, model_folder) as sampler:
        rollouts = sampler.score(
            sampler.engine.run(
                rows, num_generations_per_prompt=num_generations_per_prompt, step=iteration
            )
        )
        peak_memory_gib = sampler.generation.peak_memory_gib()
    # Only the first training sample of an episode has the prompt, which a pair must share.
    firsts = [each for each in rollouts if each.part == 0]
    pairs = pairs_from_rollouts(firsts, margin=margin)
    if not pairs:
        raise DataError(
            "no prompt gives a preference pair: the completions of each have the same reward",
            expected=f"rewards that differ by more than {margin} for some prompt",
            got=f"{len(firsts)} completions of {len(rows)} prompts",
            fix="sample more completions per prompt, or begin with a model that is sometimes right",
        )
    num_tokens = sum(len(rollout.completion.token_ids) for rollout in rollouts)
    num_failed = sum(each.error is not None for each in firsts)
    return SampledPairs(pairs, len(rows), num_tokens, peak_memory_gib, num_failed)
