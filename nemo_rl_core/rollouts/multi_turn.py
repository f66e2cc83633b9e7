"""Multi-turn rollouts: the policy speaks, the environment answers, until either has enough."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_core.data.replies import reply_token_ids
from nemo_rl_core.environments.interfaces import EnvironmentInterface, StopsFirstTurn
from nemo_rl_core.environments.multi_turn.replies import checked_replies
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.engine import (
    RolloutEngine,
    RolloutPlace,
    as_batch,
    held_results,
)
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode, played_rollouts
from nemo_rl_core.rollouts.held import HeldRollouts
from nemo_rl_core.types import Prompt

if TYPE_CHECKING:
    from nemo_rl_core.models.generation.engine import Generation


class MultiTurnRollouts(RolloutEngine[MultiTurnEpisode]):
    """Plays episodes: each round asks the engine once, and then the environment once.

    The environment scores each episode by its own turns, and their rollouts have a reward, or
    say why they have none.

    Args:
        generation: The engine.
        tokenizer: Decodes the policy's turns; encodes the environment's.
        environment: Answers, and rewards each turn; it may say where the first one stops
            (`StopsFirstTurn`).
        seed: The run's seed.
        bounds: Where an episode is cut.

    Raises:
        DataError: If the chat template cannot append turns to what the policy has said.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        tokenizer: Any,
        environment: EnvironmentInterface,
        *,
        seed: int,
        bounds: Bounds,
    ) -> None:
        # A template that cannot do it is better refused here than after the first answers.
        reply_token_ids(tokenizer, "1", {"role": "user", "content": "2"}, last_token=None)
        super().__init__(generation, tokenizer, seed=seed)
        self._environment = environment
        self._bounds = bounds
        self._first_stops: tuple[str, ...] = ()
        if isinstance(environment, StopsFirstTurn):
            self._first_stops = tuple(environment.first_stop_strings)

    def episode(
        self, prompt: Prompt, place: RolloutPlace, *, holds: bool = False
    ) -> MultiTurnEpisode:
        """A rollout that has not begun."""
        return MultiTurnEpisode(
            prompt,
            place,
            bounds=self._bounds,
            tokenizer=self._tokenizer,
            stop_strings=self._first_stops,
            holds=holds,
        )

    def run_held(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        discards_weights: bool = False,
    ) -> HeldRollouts:
        """As `RolloutEngine.run_held`, in one call of each engine a turn."""
        places = self._places(prompts, num_generations_per_prompt, step, first_place)
        episodes = [self.episode(*each, holds=True) for each in places]
        generation = cast("Generation", self._generation)
        generation.prepare_for_generation()
        self._play(episodes, lambda asked: held_results(generation.continue_held(as_batch(asked))))
        generation.finish_generation(discards_weights=discards_weights)
        return played_rollouts(places, [each.played() for each in episodes])

    def _step_environment(self, episodes: Sequence[MultiTurnEpisode]) -> None:
        replies = checked_replies(
            self._environment,
            [list(each.messages) for each in episodes],
            [each.metadata for each in episodes],
        )
        for episode, reply in zip(episodes, replies, strict=True):
            episode.add_observation(reply)
