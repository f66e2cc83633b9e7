"""Multi-turn rollouts: policy and environment alternate until either ends the episode."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.distributed.event_loop import CallQueue
from nemo_rl_core.environments.conversations import Answer, answers_at_once, conversations
from nemo_rl_core.environments.interfaces import EnvironmentInterface, StopsFirstTurn
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.driver import play_all, rollouts_of
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    CompletionResult,
    Episode,
    RolloutEngine,
    RolloutIndex,
    joined_requests,
    results_of,
)
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Prompt

NewEpisode = Callable[[Prompt, RolloutIndex], Episode]


class EpisodeRollouts(RolloutEngine):
    """Plays episodes, each at its own pace.

    Time never changes a rollout: the engine completes each request in a batch of one row, unless
    all episodes advance in rounds.
    """

    _is_in_rounds = False

    @abstractmethod
    def episode(self, prompt: Prompt, index: RolloutIndex) -> Episode:
        """Creates a rollout that has not begun."""

    def _new_episode(self, calls: CallQueue) -> NewEpisode:
        return self.episode

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
        """Plays an episode per rollout, each at its own pace; see `RolloutEngine.run`."""
        indexed = [
            (prompt, RolloutIndex(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=first_group)
            for sample in range(num_generations_per_prompt)
        ]
        calls = CallQueue()
        new_episode = self._new_episode(calls)
        episodes = [(each[0], new_episode(*each)) for each in indexed]
        if releases_memory:
            self._generation.prepare_for_generation()
        played = play_all(episodes, partial(self._completed, greedy=greedy), calls)
        if releases_memory:
            self._generation.finish_generation(discards_weights=discards_weights)
        return rollouts_of(indexed, played)

    def _completed(
        self, requests: list[CompletionRequest], *, greedy: bool
    ) -> list[CompletionResult]:
        completions = self._generation.complete(
            joined_requests(requests, separately=not self._is_in_rounds),
            greedy=greedy,
            weight_version=self.weight_version,
        )
        self.has_logprobs &= completions.has_logprobs
        return results_of(completions)


class MultiTurnRollouts(EpisodeRollouts):
    """Plays episodes with an environment, each at its own pace.

    The environment rewards each turn, and each rollout has a reward or an error. If it answers all
    conversations together, the engine completes them together, too.

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
        self._is_in_rounds = answers_at_once(environment)
        self._first_stops: tuple[str, ...] = ()
        if isinstance(environment, StopsFirstTurn):
            self._first_stops = tuple(environment.first_stop_strings)

    def episode(
        self, prompt: Prompt, index: RolloutIndex, answers: Callable[[int], Answer] | None = None
    ) -> MultiTurnEpisode:
        """Creates a rollout that has not begun; `play` needs the `conversations` to answer it."""
        return MultiTurnEpisode(
            prompt,
            index,
            bounds=self._bounds,
            tokenizer=self._tokenizer,
            stop_strings=self._first_stops,
            answer=answers and answers(index.group + index.sample),
        )

    def _new_episode(self, calls: CallQueue) -> NewEpisode:
        return partial(self.episode, answers=conversations(self._environment, calls))
