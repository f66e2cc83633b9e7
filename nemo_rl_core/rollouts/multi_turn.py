"""Multi-turn rollouts: policy and environment alternate until either ends the episode."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.distributed.event_loop import CallQueue
from nemo_rl_core.environments.conversations import Answer, answers_at_once, conversations
from nemo_rl_core.environments.interfaces import EnvironmentInterface, StopsFirstTurn
from nemo_rl_core.models.generation.streaming import TurnGeneration
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.driver import play_all
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    CompletionResult,
    Episode,
    RolloutEngine,
    RolloutIndex,
    joined_requests,
    results_of,
)
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode, played_rollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Prompt


class EpisodeRollouts(RolloutEngine):
    """Plays episodes, each at its own pace.

    Time never changes the tokens of a rollout, and with other engines than vLLM no bit: they
    complete each request in a batch of one row, unless an environment answers all conversations
    together, which makes the batches the same in each run.
    """

    _environment: EnvironmentInterface | None = None

    @property
    def _is_in_rounds(self) -> bool:
        return self._environment is not None and answers_at_once(self._environment)

    @abstractmethod
    def episode(
        self, prompt: Prompt, index: RolloutIndex, answers: Callable[[int], Answer] | None = None
    ) -> Episode:
        """Creates a rollout that has not begun.

        Args:
            answers: The `conversations` of the environment, if there is one.
        """

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
        if releases_memory:
            self._generation.prepare_for_generation()
        run = self._run_streamed
        if greedy or self._is_in_rounds or not isinstance(self._generation, TurnGeneration):
            run = partial(self._run_batched, greedy=greedy)
        rollouts = run(prompts, num_generations_per_prompt, step=step, first_group=first_group)
        if releases_memory:
            self._generation.finish_generation(discards_weights=discards_weights)
        return rollouts

    def _run_streamed(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int, first_group: int
    ) -> RemoteRollouts:
        engine, seed = self._generation, self._seed
        with RolloutStream(engine, self.episode, self._environment, seed=seed) as stream:
            stream.begin(
                prompts,
                num_generations_per_prompt=group_size,
                step=step,
                first_group=first_group,
            )
            return RemoteRollouts.of(stream.take(step))

    def _run_batched(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        step: int,
        first_group: int,
        greedy: bool,
    ) -> RemoteRollouts:
        indexed = [
            (prompt, RolloutIndex(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=first_group)
            for sample in range(group_size)
        ]
        calls = CallQueue()
        environment = self._environment
        answers = None if environment is None else conversations(environment, calls)
        episodes = [(each[0], self.episode(*each, answers)) for each in indexed]
        return played_rollouts(
            indexed, play_all(episodes, partial(self._completed, greedy=greedy), calls)
        )

    def _completed(
        self, requests: list[CompletionRequest], *, greedy: bool
    ) -> list[CompletionResult]:
        is_vllm = isinstance(getattr(self._generation, "config", None), VllmGenerationConfig)
        completions = self._generation.complete(
            joined_requests(requests, separately=not (self._is_in_rounds or is_vllm)),
            greedy=greedy,
            weight_version=self.weight_version,
        )
        self.has_logprobs &= completions.has_logprobs
        return results_of(completions)


class MultiTurnRollouts(EpisodeRollouts):
    """Plays episodes with an environment.

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
