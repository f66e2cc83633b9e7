"""Multi-turn rollouts: the policy speaks, the environment answers, until either has enough."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.data.replies import reply_token_ids
from nemo_rl_core.environments.interfaces import EnvironmentInterface, StopsFirstTurn
from nemo_rl_core.environments.replies import judge
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.conversation import Bounds, Conversation
from nemo_rl_core.rollouts.engine import Place, RolloutEngine
from nemo_rl_core.rollouts.requests import answers_to
from nemo_rl_core.types import Prompt, Rollout


class MultiTurnRollouts(RolloutEngine):
    """Plays conversations, all that go on in step with each other.

    Each round asks the engine once, and then the environment once, for every conversation that is
    not over. What a conversation becomes does not depend on which others there are: its requests
    have seeds of their own, and the environment judges each by its own turns.

    Args:
        generation: The engine.
        tokenizer: Decodes the policy's turns; encodes the environment's.
        environment: Answers, and rewards each turn; it may say where the first one stops
            (`StopsFirstTurn`).
        seed: The run's seed.
        bounds: Where a conversation is cut.

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
        self._generation = generation
        self._tokenizer = tokenizer
        self._environment = environment
        self._seed = seed
        self._bounds = bounds
        self._first_stops: tuple[str, ...] = ()
        if isinstance(environment, StopsFirstTurn):
            self._first_stops = tuple(environment.first_stop_strings)

    def dialogue(self, prompt: Prompt, place: Place) -> Conversation:
        """A rollout that has not begun."""
        return Conversation(
            prompt,
            place,
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
        first_place: int = 0,
        greedy: bool = False,
    ) -> list[Rollout]:
        """As `RolloutEngine.run`; each rollout has a reward, or says why it has none."""
        conversations = [
            self.dialogue(prompt, Place(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=first_place)
            for sample in range(num_generations_per_prompt)
        ]
        while live := [each for each in conversations if not each.is_over]:
            requests = [each.request() for each in live]
            answers = answers_to(requests, self._generation, greedy=greedy)
            for conversation, answer in zip(live, answers, strict=True):
                conversation.hear_policy(answer)
            replies = judge(
                self._environment,
                [list(each.messages) for each in live],
                [each.metadata for each in live],
            )
            for conversation, reply in zip(live, replies, strict=True):
                conversation.hear_environment(reply)
        return [each.rollout() for each in conversations]
