"""Rollouts of several steps under way at once, for a trainer that does not wait for its engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from nemo_rl_core.environments.interfaces import EnvironmentInterface
from nemo_rl_core.environments.replies import checked_replies
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.conversation import Conversation
from nemo_rl_core.rollouts.engine import Dialogue, Place
from nemo_rl_core.rollouts.requests import Answer, as_batch
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.types import Completion, Prompt, Rollout

_POLL_SECONDS = 1.0
_MAX_FRUITLESS_RESTARTS = 2
T = TypeVar("T")


@dataclass
class _Asked:
    """One rollout that is under way, or done.

    Attributes:
        prompt: Of the dialogue.
        place: Of the dialogue.
        dialogue: As far as it is.
        num_attempts: How often it was begun.
        failure: Why it was given up.
    """

    prompt: Prompt
    place: Place
    dialogue: Dialogue
    num_attempts: int = 1
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.dialogue.is_over

    def rollout(self) -> Rollout:
        if self.failure is None:
            return self.dialogue.rollout()
        place, nothing = self.place, Completion((), (), truncated=True)
        return Rollout(
            self.prompt, nothing, "", group=place.group, sample=place.sample, error=self.failure
        )


class RolloutStream:
    """Asks an engine for the rollouts of steps to come, and hands them out step by step.

    Steps are handed out in order, and the rollouts of a step by group and sample, whatever order
    they came in. So what is trained on when does not depend on time; only which version of the
    weights drew a token does, and that is in the record.

    Args:
        generation: Goes on generating between calls, for this stream alone.
        dialogue: Makes the `Exchange` or `Conversation` of a prompt.
        environment: Answers conversations; None where nobody answers.
        seed: The run's.
        timeout_seconds: How long `take` waits before what is missing is asked for once more, and
            again before it is given up; None waits for ever.
    """

    def __init__(
        self,
        generation: StreamingGeneration,
        dialogue: Callable[[Prompt, Place], Dialogue],
        environment: EnvironmentInterface | None,
        *,
        seed: int,
        timeout_seconds: float | None = None,
    ) -> None:
        self._generation = generation
        self._dialogue = dialogue
        self._environment = environment
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._names = count()
        self._steps: dict[int, list[_Asked]] = {}
        self._in_flight: dict[int, _Asked] = {}
        self._num_restarts = generation.num_restarts
        self._num_fruitless_restarts = 0

    def begin(
        self, prompts: Sequence[Prompt], *, num_generations_per_prompt: int, step: int
    ) -> None:
        """Asks for a step's rollouts and returns at once.

        Args:
            prompts: `P` prompts.
            num_generations_per_prompt: G.
            step: Not begun before.
        """
        places = [
            (prompt, Place(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts)
            for sample in range(num_generations_per_prompt)
        ]
        self._steps[step] = [_Asked(*each, self._dialogue(*each)) for each in places]
        self._submit(self._steps[step])

    def take(self, step: int) -> list[Rollout]:
        """Waits for a step's rollouts, while those of later steps go on.

        Returns:
            All that were begun, by group and sample; one that never came has an error.

        Raises:
            WorkerLostError: If the engine's worker is lost time and again before it completes
                anything.
        """
        wanted = self._steps.pop(step)
        deadline = self._deadline()
        while missing := [each for each in wanted if not each.is_over]:
            left = deadline - time.monotonic()
            if left < 0:
                self._begin_again(missing)
                deadline = self._deadline()
                continue
            poll = partial(self._generation.poll, wait_seconds=min(left, _POLL_SECONDS))
            self._hear(self._survive(poll) or [])
        return [each.rollout() for each in wanted]

    def _deadline(self) -> float:
        return time.monotonic() + (self._timeout_seconds or float("inf"))

    def _submit(self, asked: Sequence[_Asked]) -> None:
        if not asked:
            return
        names = [next(self._names) for _ in asked]
        self._in_flight.update(zip(names, asked, strict=True))
        requests = as_batch([each.dialogue.request() for each in asked])
        self._survive(lambda: self._generation.submit(names, requests))

    def _survive(self, call: Callable[[], T]) -> T | None:
        """What the engine returns; None where its worker is lost, which is then started again.

        A new worker knows of no requests, whoever started it, so all that are owed are made again.
        """
        returned = None
        try:
            returned = call()
        except WorkerLostError as lost:
            if self._num_fruitless_restarts == _MAX_FRUITLESS_RESTARTS:
                raise
            self._num_fruitless_restarts += 1
            self._generation.restart(lost)
        if self._generation.num_restarts > self._num_restarts:
            self._num_restarts = self._generation.num_restarts
            owed = list(self._in_flight.values())
            self._in_flight.clear()
            self._submit(owed)
        return returned

    def _begin_again(self, missing: Sequence[_Asked]) -> None:
        """From the first token, for it may be what was said that is stuck; gives up in the end."""
        names = {id(each): name for name, each in self._in_flight.items()}
        stuck = [names[id(each)] for each in missing if id(each) in names]
        for name in stuck:
            del self._in_flight[name]
        self._survive(lambda: self._generation.cancel(stuck))
        for each in missing:
            if each.num_attempts > 1:
                each.failure = f"no answer within {self._timeout_seconds:g} s, twice"
            else:
                each.num_attempts += 1
                each.dialogue = self._dialogue(each.prompt, each.place)
        self._submit([each for each in missing if each.failure is None])

    def _hear(self, answers: Sequence[tuple[int, Completion]]) -> None:
        heard = []
        for name, made in answers:
            asked = self._in_flight.pop(name, None)
            if asked is None:
                continue  # given up, and finished in the same moment
            self._num_fruitless_restarts = 0
            asked.dialogue.hear_policy(
                Answer(made.token_ids, made.logprobs, made.truncated, made.weight_versions)
            )
            heard.append(asked)
        self._let_environment_answer(heard)
        self._submit([each for each in heard if not each.is_over])

    def _let_environment_answer(self, heard: Sequence[_Asked]) -> None:
        talking = [each.dialogue for each in heard if isinstance(each.dialogue, Conversation)]
        if not talking:
            return
        assert self._environment is not None
        replies = checked_replies(
            self._environment,
            [list(each.messages) for each in talking],
            [each.metadata for each in talking],
        )
        for dialogue, reply in zip(talking, replies, strict=True):
            dialogue.hear_environment(reply)


class StreamingSampler(Sampler):
    """A `Sampler` whose engine goes on generating between calls."""

    _engine_class = StreamingGeneration
    generation: StreamingGeneration

    def stream(self, *, seed: int, timeout_seconds: float | None = None) -> RolloutStream:
        """Rollouts of steps to come, as `RolloutStream` has it."""
        return RolloutStream(
            self.generation,
            self.engine.dialogue,
            self.environment,
            seed=seed,
            timeout_seconds=timeout_seconds,
        )
