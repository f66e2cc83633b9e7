"""State of the rollouts and steps that a stream has under way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_core.models.generation.remote_completions import RemoteCompletions, without_tokens
from nemo_rl_core.models.generation.streaming import KeptCompletion
from nemo_rl_core.rollouts.engine import CompletionRequest, CompletionResult, RolloutIndex
from nemo_rl_core.rollouts.episode import PlayedEpisode
from nemo_rl_core.rollouts.remote_rollouts import CompletionSource, RemoteRollouts
from nemo_rl_core.types import Prompt


@dataclass(eq=False)
class PendingRollout:
    """A rollout that is under way or finished.

    Attributes:
        first_version: First version of the weights that may complete its requests.
        num_attempts: Number of times that it was begun.
        playing: Task of an episode; None for a single turn.
        samples: Result of an episode.
        kept: Completion of a single turn, with the id of its request.
    """

    prompt: Prompt
    index: RolloutIndex
    first_version: int = 0
    num_attempts: int = 1
    failure: str | None = None
    playing: "asyncio.Task[Sequence[PlayedEpisode]] | None" = None
    samples: Sequence[PlayedEpisode] | None = None
    kept: tuple[int, KeptCompletion] | None = None

    @property
    def requested(self) -> tuple[Prompt, RolloutIndex]:
        """Prompt and position of the rollout."""
        return self.prompt, self.index

    def played(self) -> Sequence[PlayedEpisode]:
        """Returns the samples of an episode."""
        if self.failure is not None:
            return [PlayedEpisode.failed(self.prompt, self.failure)]
        assert self.samples is not None
        return self.samples

    @property
    def is_over(self) -> bool:
        """Whether the rollout has ended or failed."""
        return any(each is not None for each in (self.failure, self.kept, self.samples))


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """A request that the engine has not answered; `answer` is None for a single turn."""

    rollout: PendingRollout
    request: CompletionRequest
    answer: "asyncio.Future[CompletionResult] | None" = None


@dataclass
class PendingStep:
    """Draws of a step.

    Attributes:
        draw: Rollouts of the draw under way; empty once `on_draw` has them.
        drawn: Rollouts of the draws that have ended, one item per draw.
        is_drawn: Whether the step needs no further draw.
    """

    num_generations_per_prompt: int
    num_prompts: int = 0
    draw: list[PendingRollout] = field(default_factory=list)
    drawn: list[RemoteRollouts] = field(default_factory=list)
    is_drawn: bool = False
    failure: Exception | None = None

    @property
    def missing(self) -> list[PendingRollout]:
        """Rollouts of its draw that have not ended."""
        return [each for each in self.draw if not each.is_over]

    @property
    def has_ended_draw(self) -> bool:
        """Whether all rollouts of its draw have ended and `on_draw` does not have them yet."""
        return bool(self.draw) and all(each.is_over for each in self.draw)


def remote_rollouts(
    draw: Sequence[PendingRollout], completions: RemoteCompletions
) -> RemoteRollouts:
    """Returns the rollouts of a draw, which refer to their completions."""
    has_failed = np.array([each.failure is not None for each in draw])
    failed = [draw[row] for row in np.flatnonzero(has_failed).tolist()]
    source = CompletionSource(completions)
    if failed:
        nothing = without_tokens([each.prompt.token_ids for each in failed])
        source = CompletionSource.joined([source, CompletionSource(nothing)])
    index = np.empty(len(draw), np.int64)
    index[~has_failed] = np.arange(len(draw) - len(failed))
    index[has_failed] = np.arange(len(draw) - len(failed), len(draw))
    prompts = {each.index.group: each.prompt for each in draw}
    group = np.array([each.index.group for each in draw])
    return RemoteRollouts(
        source,
        index,
        tuple(prompts.values()),
        np.unique(group, return_inverse=True)[1],
        group,
        np.array([each.index.sample for each in draw]),
        errors={row: str(draw[row].failure) for row in np.flatnonzero(has_failed).tolist()},
    )
