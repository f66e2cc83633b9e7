"""Multi-turn rollouts: policy and environment alternate until either ends the episode."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.environments.interfaces import EnvironmentInterface, StopsFirstTurn
from nemo_rl_core.environments.multi_turn.replies import checked_replies
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.engine import (
    RolloutEngine,
    RolloutIndex,
    joined_requests,
    results_of,
)
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode, played_rollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Prompt


class MultiTurnRollouts(RolloutEngine):
    """Plays episodes; each round calls the engine once and then the environment once.

    The environment rewards each turn, and each rollout has a reward or an error.

    Args:
        generation: The engine.
        tokenizer: Tokenizer that decodes the policy's turns and encodes the environment's.
        environment: Environment that answers and rewards each turn; it may set stop strings for
            the first turn (`StopsFirstTurn`).
        seed: Seed of the run.
        bounds: Limits at which an episode is cut.

    Raises:
        DataError: If the chat template cannot append turns to a completion.
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
        # Refuses an unsuitable chat template before the first completions.
        turns = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
        Renderer(tokenizer).continuation(turns[:2], turns[2:], last_token=None, row="a turn")
        super().__init__(generation, tokenizer, seed=seed)
        self._environment = environment
        self._bounds = bounds
        self._first_stops: tuple[str, ...] = ()
        if isinstance(environment, StopsFirstTurn):
            self._first_stops = tuple(environment.first_stop_strings)

    def episode(self, prompt: Prompt, index: RolloutIndex) -> MultiTurnEpisode:
        """Creates a rollout that has not begun."""
        return MultiTurnEpisode(
            prompt,
            index,
            bounds=self._bounds,
            tokenizer=self._tokenizer,
            stop_strings=self._first_stops,
        )

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_group: int = 0,
        greedy: bool = False,
        releases_memory: bool = False,
        discards_weights: bool = False,
    ) -> RemoteRollouts:
        """Rolls out every prompt with one call per engine and turn; see `RolloutEngine.run`."""
        indexed = [
            (prompt, RolloutIndex(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=first_group)
            for sample in range(num_generations_per_prompt)
        ]
        episodes = [self.episode(*each) for each in indexed]
        if releases_memory:
            self._generation.prepare_for_generation()
        while live := [each for each in episodes if not each.is_over]:
            requests = joined_requests([each.request() for each in live])
            completions = self._generation.complete(
                requests, greedy=greedy, weight_version=self.weight_version
            )
            self.has_logprobs &= completions.has_logprobs
            for episode, result in zip(live, results_of(completions), strict=True):
                episode.add_completion(result)
            self._step_environment(live)
        if releases_memory:
            self._generation.finish_generation(discards_weights=discards_weights)
        return played_rollouts(indexed, [each.played() for each in episodes])

    def _step_environment(self, episodes: Sequence[MultiTurnEpisode]) -> None:
        replies = checked_replies(
            self._environment,
            [list(each.messages) for each in episodes],
            [each.metadata for each in episodes],
        )
        for episode, reply in zip(episodes, replies, strict=True):
            episode.add_observation(reply)
