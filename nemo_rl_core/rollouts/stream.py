"""Rollouts of several steps under way at once, for a trainer that does not wait for its engine.

A thread of the stream's own hears what the engine has completed, lets the environment answer and
asks on, so that conversations go on while the model trains. The caller's thread begins steps, takes
them, and hands over weights. What either does with the engine it does under one lock; an
environment, which may be slow, is asked outside of it.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from nemo_rl_core.environments.interfaces import EnvironmentInterface
from nemo_rl_core.environments.multi_turn.replies import checked_replies
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.conversation import Conversation
from nemo_rl_core.rollouts.engine import Dialogue, RolloutPlace
from nemo_rl_core.rollouts.requests import CompletionResult, as_batch
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.types import Completion, Prompt, Rollout

_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
"""Between two looks at the engine while nobody waits: it must be free for new weights."""
_BREATH_SECONDS = 0.001
"""Between two looks while somebody waits: long enough to see that the wait is over."""
_CLOSE_SECONDS = 5.0
_MAX_FRUITLESS_RESTARTS = 2
_FOREVER = float("inf")
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
    place: RolloutPlace
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


class RolloutStream(AbstractContextManager["RolloutStream"]):
    """Asks an engine for the rollouts of steps to come, and hands them out step by step.

    Steps are handed out in order, and the rollouts of a step by group and sample, whatever order
    they came in. So what is trained on when does not depend on time; only which version of the
    weights drew a token does, and that is in the record.

    A lost engine is started again only by the caller's leave, in `begin`, `take` or `alone`: while
    the model trains, the weights that the engine had are nowhere any more.

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
        dialogue: Callable[[Prompt, RolloutPlace], Dialogue],
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
        # Of all above, of the engine, and of these: who waits in `take` until when, and what went
        # wrong in the thread.
        self._lock = threading.Condition()
        self._deadline: float | None = None
        self._is_lost = False
        self._failure: Exception | None = None
        # Of the environment; whoever needs both takes this one first.
        self._speech = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="rollouts", daemon=True)
        self._thread.start()

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
            (prompt, RolloutPlace(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts)
            for sample in range(num_generations_per_prompt)
        ]
        with self._lock:
            self._ask_after_restart(may_restart=True)
            self._steps[step] = [_Asked(*each, self._dialogue(*each)) for each in places]
            self._submit(self._steps[step], may_restart=True)
            self._lock.notify_all()

    def take(self, step: int) -> list[Rollout]:
        """Waits for a step's rollouts, while those of later steps go on.

        Returns:
            All that were begun, by group and sample; one that never came has an error.

        Raises:
            WorkerLostError: If the engine's worker is lost time and again before it completes
                anything.
        """
        with self._lock:
            wanted = self._steps.pop(step)
            try:
                self._wait_for(wanted)
            finally:
                self._deadline = None
            return [each.rollout() for each in wanted]

    def _wait_for(self, wanted: Sequence[_Asked]) -> None:
        self._deadline = self._new_deadline()
        self._lock.notify_all()
        while missing := [each for each in wanted if not each.is_over]:
            if self._failure is not None:
                raise self._failure
            left = self._deadline - time.monotonic()
            if left < 0:
                self._begin_again(missing)
                self._deadline = self._new_deadline()
            else:
                self._lock.wait(min(left, _POLL_SECONDS))

    @contextmanager
    def alone(self, *, with_environment: bool = False) -> Generator[None]:
        """Nobody else uses the engine meanwhile, which may be given weights or started again.

        Args:
            with_environment: Nor the environment, whose answer is waited for first.
        """
        if with_environment:
            with self._speech, self._lock:
                yield
        else:
            with self._lock:
                yield

    def close(self) -> None:
        """Ends the thread; what is under way is forgotten, and given up by the engine's next user.

        Waits no longer than some seconds for an environment, or an engine, that hangs.
        """
        self._is_closed = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._lock.notify_all()
            self._lock.release()
        self._thread.join(_CLOSE_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        """The thread: hears, lets the environment answer, asks on."""
        try:
            while True:
                with self._lock:
                    while not (self._is_closed or self._has_something_to_hear()):
                        self._lock.wait()
                    if self._is_closed:
                        return
                    heard = self._hear()
                if heard and self._environment is not None:
                    self._let_environment_answer(heard, self._environment)
                with self._lock:
                    self._lock.notify_all()
                    pause = _PAUSE_SECONDS if self._deadline is None else _BREATH_SECONDS
                    self._lock.wait(pause)
        # Named fault boundary: nobody would hear of an exception in a thread; `take` raises it.
        except Exception as error:  # noqa: BLE001 (raised by take)
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _has_something_to_hear(self) -> bool:
        """Also while nobody waits, where the environment must answer; else it can wait."""
        if not self._in_flight:
            return False
        is_awaited = self._deadline is not None
        return is_awaited or (self._environment is not None and not self._is_lost)

    def _hear(self) -> list[_Asked]:
        """What has been completed since, now part of its dialogue."""
        wait_seconds = 0.0
        if self._deadline is not None:
            wait_seconds = max(0.0, min(self._deadline - time.monotonic(), _POLL_SECONDS))
        answers = self._survive(
            lambda: self._generation.poll(wait_seconds=wait_seconds),
            may_restart=self._deadline is not None,
        )
        heard = []
        for name, made in answers or []:
            asked = self._in_flight.pop(name, None)
            if asked is None:
                continue  # given up, and finished in the same moment
            self._num_fruitless_restarts = 0
            asked.dialogue.hear_policy(
                CompletionResult(
                    made.token_ids, made.logprobs, made.truncated, made.weight_versions
                )
            )
            heard.append(asked)
        return heard

    def _let_environment_answer(
        self, heard: Sequence[_Asked], environment: EnvironmentInterface
    ) -> None:
        talking = [
            (each, each.dialogue) for each in heard if isinstance(each.dialogue, Conversation)
        ]
        with self._speech:
            replies = checked_replies(
                environment,
                [list(dialogue.messages) for _, dialogue in talking],
                [dialogue.metadata for _, dialogue in talking],
            )
        with self._lock:
            for (_, dialogue), reply in zip(talking, replies, strict=True):
                dialogue.hear_environment(reply)
            # Not those that were begun again, or given up, while the environment thought.
            go_on = [each for each, dialogue in talking if each.dialogue is dialogue]
            self._submit(
                [each for each in go_on if not each.is_over],
                may_restart=self._deadline is not None,
            )

    def _submit(self, asked: Sequence[_Asked], *, may_restart: bool) -> None:
        if not asked:
            return
        names = [next(self._names) for _ in asked]
        self._in_flight.update(zip(names, asked, strict=True))
        requests = as_batch([each.dialogue.request() for each in asked])
        self._survive(lambda: self._generation.submit(names, requests), may_restart=may_restart)

    def _survive(self, call: Callable[[], T], *, may_restart: bool) -> T | None:
        """What the engine returns; None where its worker is lost.

        It is then started again, now or when that may be.
        """
        returned = None
        try:
            returned = call()
        except WorkerLostError as lost:
            if not may_restart:
                self._is_lost = True
                return None
            if self._num_fruitless_restarts == _MAX_FRUITLESS_RESTARTS:
                raise
            self._num_fruitless_restarts += 1
            self._generation.restart(lost)
        self._ask_after_restart(may_restart=may_restart)
        return returned

    def _ask_after_restart(self, *, may_restart: bool) -> None:
        """A new worker, whoever started it, knows of no requests: all that are owed are made."""
        if self._generation.num_restarts > self._num_restarts:
            self._num_restarts, self._is_lost = self._generation.num_restarts, False
            owed = list(self._in_flight.values())
            self._in_flight.clear()
            self._submit(owed, may_restart=may_restart)

    def _begin_again(self, missing: Sequence[_Asked]) -> None:
        """From the first token, for it may be what was said that is stuck; gives up in the end."""
        names = {id(each): name for name, each in self._in_flight.items()}
        stuck = [names[id(each)] for each in missing if id(each) in names]
        for name in stuck:
            del self._in_flight[name]
        self._survive(lambda: self._generation.cancel(stuck), may_restart=True)
        for each in missing:
            if each.num_attempts > 1:
                each.failure = f"no answer within {self._timeout_seconds:g} s, twice"
            else:
                each.num_attempts += 1
                each.dialogue = self._dialogue(each.prompt, each.place)
        again = [each for each in missing if each.failure is None]
        self._submit(again, may_restart=True)

    def _new_deadline(self) -> float:
        return time.monotonic() + (self._timeout_seconds or _FOREVER)


class StreamingSampler(Sampler):
    """A `Sampler` whose engine goes on generating between calls."""

    _engine_class = StreamingGeneration
    generation: StreamingGeneration
    _stream: RolloutStream | None = None

    def stream(self, *, seed: int, timeout_seconds: float | None = None) -> RolloutStream:
        """Rollouts of steps to come, as `RolloutStream` has it; there is one at a time."""
        self._close_stream()
        self._stream = RolloutStream(
            self.generation,
            self.engine.dialogue,
            self.environment,
            seed=seed,
            timeout_seconds=timeout_seconds,
        )
        return self._stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __exit__(self, *exception: object) -> None:
        self._close_stream()
        super().__exit__(*exception)
