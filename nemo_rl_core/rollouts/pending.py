"""What a stream of rollouts knows of those that are under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_core.models.generation.streaming import KeptCompletion
from nemo_rl_core.models.generation.where_made import HeldCompletions, without_tokens
from nemo_rl_core.rollouts.engine import Episode, RolloutPlace
from nemo_rl_core.rollouts.episode import MultiTurnEpisode, PlayedEpisode
from nemo_rl_core.rollouts.held import HeldRollouts, HeldSource
from nemo_rl_core.types import Completion, Prompt, Rollout


@dataclass
class PendingRollout:
    """One rollout that is under way, or done.

    Attributes:
        prompt: The episode's.
        place: The episode's.
        episode: The turns so far.
        num_attempts: How often it was submitted from its first token.
        failure: Why it has no rollout.
        kept: The completion of a single turn, with the name under which an engine keeps it.
    """

    prompt: Prompt
    place: RolloutPlace
    episode: Episode
    num_attempts: int = 1
    failure: str | None = None
    kept: tuple[int, KeptCompletion] | None = None

    @property
    def asked(self) -> tuple[Prompt, RolloutPlace]:
        """What an episode is made of."""
        return self.prompt, self.place

    def played(self) -> PlayedEpisode:
        """What has become of an episode of several turns, whose tokens are held."""
        assert isinstance(self.episode, MultiTurnEpisode)
        if self.failure is None:
            return self.episode.played()
        return PlayedEpisode.failed(self.prompt, self.failure)

    @property
    def is_over(self) -> bool:
        """Whether there is, or will never be, a rollout."""
        return self.failure is not None or self.kept is not None or self.episode.is_over

    def rollout(self) -> Rollout:
        """The record of the episode, or of its failure."""
        if self.failure is None:
            return self.episode.rollout()
        place, nothing = self.place, Completion((), (), truncated=True)
        return Rollout(
            self.prompt, nothing, "", group=place.group, sample=place.sample, error=self.failure
        )


@dataclass
class PendingStep:
    """What a step has asked for.

    Attributes:
        num_generations_per_prompt: G.
        num_prompts: Of all its draws.
        draw: The rollouts of the draw under way; none once they were handed out.
        drawn: Those of the draws that were.
        is_drawn: Whether it needs no further draw.
        failure: What was raised over a draw.
    """

    num_generations_per_prompt: int
    num_prompts: int = 0
    draw: list[PendingRollout] = field(default_factory=list)
    drawn: list[Sequence[Rollout]] = field(default_factory=list)
    is_drawn: bool = False
    failure: Exception | None = None

    @property
    def missing(self) -> list[PendingRollout]:
        """The rollouts of its draw that have not ended."""
        return [each for each in self.draw if not each.is_over]

    @property
    def has_ended_draw(self) -> bool:
        """Whether all rollouts of its draw have ended, and were not handed out."""
        return bool(self.draw) and not self.missing


def held_rollouts(wanted: Sequence[PendingRollout], completions: HeldCompletions) -> HeldRollouts:
    """The rollouts of a draw by reference to their completions.

    Args:
        wanted: `B`, by group and sample.
        completions: Of those that have not failed, in their order.
    """
    has_failed = np.array([each.failure is not None for each in wanted])
    failed = [wanted[row] for row in np.flatnonzero(has_failed).tolist()]
    source = HeldSource(completions)
    if failed:
        nothing = without_tokens([each.prompt.token_ids for each in failed])
        source = HeldSource.joined([source, HeldSource(nothing)])
    place = np.empty(len(wanted), np.int64)
    place[~has_failed] = np.arange(len(wanted) - len(failed))
    place[has_failed] = np.arange(len(wanted) - len(failed), len(wanted))
    prompts = {each.place.group: each.prompt for each in wanted}
    group = np.array([each.place.group for each in wanted])
    return HeldRollouts(
        source,
        place,
        tuple(prompts.values()),
        np.unique(group, return_inverse=True)[1],
        group,
        np.array([each.place.sample for each in wanted]),
        errors={row: str(wanted[row].failure) for row in np.flatnonzero(has_failed).tolist()},
    )
