"""Rollouts of several steps under way at once, for a trainer that does not wait for its engine.

A thread of the stream's own collects what the engine has completed, steps the environment and
submits the next requests, so that episodes go on while the model trains. The caller's thread begins
steps, takes them, and updates weights. Both use the engine under one lock; an environment, which
may be slow, is called outside of it.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np

from nemo_rl_core.environments.interfaces import EnvironmentInterface
from nemo_rl_core.environments.multi_turn.replies import checked_replies
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.streaming import KeptCompletion, StreamingGeneration
from nemo_rl_core.models.generation.where_made import HeldCompletions, without_tokens
from nemo_rl_core.rollouts.engine import CompletionResult, Episode, RolloutPlace, as_batch
from nemo_rl_core.rollouts.episode import MultiTurnEpisode
from nemo_rl_core.rollouts.held import HeldRollouts, HeldSource
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.types import Completion, Prompt, Rollout

_MAX_WAIT_SECONDS = 1.0
_IDLE_POLL_SECONDS = 0.05
"""Between two polls while no caller waits: the engine must be free for new weights."""
_AWAITED_POLL_SECONDS = 0.001
"""Between two polls while a caller waits in `take`, so that it can see that the wait is over."""
_CLOSE_SECONDS = 5.0
_MAX_RESTARTS_IN_A_ROW = 2
_FOREVER = float("inf")
T = TypeVar("T")


@dataclass
class _PendingRollout:
    """One rollout that is under way, or done.

    Attributes:
        prompt: The episode's.
        place: The episode's.
        episode: The turns so far.
        num_attempts: How often it was submitted from its first token.
        failure: Why it has no rollout.
        kept: Its completion, with the name under which an engine keeps it.
    """

    prompt: Prompt
    place: RolloutPlace
    episode: Episode
    num_attempts: int = 1
    failure: str | None = None
    kept: tuple[int, KeptCompletion] | None = None

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.kept is not None or self.episode.is_over

    def rollout(self) -> Rollout:
        if self.failure is None:
            return self.episode.rollout()
        place, nothing = self.place, Completion((), (), truncated=True)
        return Rollout(
            self.prompt, nothing, "", group=place.group, sample=place.sample, error=self.failure
        )


class RolloutStream(AbstractContextManager["RolloutStream"]):
    """Asks an engine for the rollouts of steps to come, and hands them out step by step.

    Steps are handed out in order, and the rollouts of a step by group and sample, whatever order
    they came in. So what is trained on when does not depend on time; only which version of the
    weights drew a token does, and that is in the record.

    A lost engine is started again only in the caller's `begin`, `take` or `exclusive`: while the
    model trains, the weights that the engine had exist no more.

    Args:
        generation: Goes on generating between calls, for this stream alone.
        episode: Makes the `Episode` of a prompt.
        environment: Answers the policy's turns; None for single-turn episodes.
        seed: The run's.
        timeout_seconds: How long `take` waits before missing rollouts are sampled once more, and
            again before they fail; None waits for ever.
        holds: Whether completions stay where they are made; of single-turn episodes.
    """

    def __init__(
        self,
        generation: StreamingGeneration,
        episode: Callable[[Prompt, RolloutPlace], Episode],
        environment: EnvironmentInterface | None,
        *,
        seed: int,
        timeout_seconds: float | None = None,
        holds: bool = False,
    ) -> None:
        assert not (holds and environment is not None), "an environment reads completions"
        self._generation, self._holds = generation, holds
        generation.keeps_completions = holds
        self._new_episode = episode
        self._environment = environment
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._names = count()
        self._steps: dict[int, list[_PendingRollout]] = {}
        self._in_flight: dict[int, _PendingRollout] = {}
        self._num_restarts = generation.num_restarts
        self._num_restarts_in_a_row = 0
        # Guards all above, the engine, and these: until when a caller waits in `take`, and what the
        # thread has raised.
        self._lock = threading.Condition()
        self._deadline: float | None = None
        self._is_engine_lost = False
        self._failure: Exception | None = None
        # Guards the environment; where both locks are needed, this one is taken first.
        self._environment_lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def begin(
        self, prompts: Sequence[Prompt], *, num_generations_per_prompt: int, step: int
    ) -> None:
        """Submits a step's rollouts and returns at once.

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
            self._resubmit_after_restart(may_restart=True)
            self._steps[step] = [
                _PendingRollout(*each, self._new_episode(*each)) for each in places
            ]
            self._submit(self._steps[step], may_restart=True)
            self._lock.notify_all()

    def take(self, step: int) -> Sequence[Rollout]:
        """Waits for a step's rollouts, while those of later steps go on.

        Returns:
            All that were begun, by group and sample; one that never came has an error.

        Raises:
            WorkerLostError: If the engine's worker is lost time and again before it completes
                anything.
        """
        with self._lock:
            self._resubmit_after_restart(may_restart=True)  # of what a lost engine has kept, too
            wanted = self._steps[step]
            try:
                self._wait_for(wanted)
                if self._holds:
                    return self._handed_over(wanted)
                return [each.rollout() for each in wanted]
            finally:
                self._deadline = None
                del self._steps[step]

    def _handed_over(self, wanted: Sequence[_PendingRollout]) -> HeldRollouts:
        """The rollouts of a step, all of which have ended, by reference to their completions."""
        completions = None
        while completions is None:
            kept = dict(each.kept for each in wanted if each.kept is not None)
            completions = self._call_engine(
                partial(self._generation.hand_over, kept), may_restart=True
            )
            if completions is None:  # an engine was lost with what it kept
                self._wait_for(wanted)
        return _held_rollouts(wanted, completions)

    def _wait_for(self, wanted: Sequence[_PendingRollout]) -> None:
        self._deadline = self._new_deadline()
        self._lock.notify_all()
        while missing := [each for each in wanted if not each.is_over]:
            if self._failure is not None:
                raise self._failure
            left = self._deadline - time.monotonic()
            if left < 0:
                self._retry(missing)
                self._deadline = self._new_deadline()
            else:
                self._lock.wait(min(left, _MAX_WAIT_SECONDS))

    @contextmanager
    def exclusive(self, *, with_environment: bool = False) -> Generator[None]:
        """Holds the engine, for new weights or a restart.

        Args:
            with_environment: Hold the environment too, once a step under way has returned.
        """
        if with_environment:
            with self._environment_lock, self._lock:
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

    def _run(self) -> None:
        """The thread: polls the engine, steps the environment, submits the next turns."""
        try:
            while True:
                with self._lock:
                    while not (self._is_closed or self._must_poll()):
                        self._lock.wait()
                    if self._is_closed:
                        return
                    completed = self._poll()
                if completed and self._environment is not None:
                    self._step_environment(completed, self._environment)
                with self._lock:
                    self._lock.notify_all()
                    pause = _IDLE_POLL_SECONDS if self._deadline is None else _AWAITED_POLL_SECONDS
                    self._lock.wait(pause)
        # Named fault boundary: an exception in a thread would be lost; `take` raises it.
        except Exception as error:  # noqa: BLE001 (raised by take)
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _must_poll(self) -> bool:
        """Whether a caller waits, or completions may have to go to the environment."""
        if not self._in_flight:
            return False
        is_awaited = self._deadline is not None
        return is_awaited or (self._environment is not None and not self._is_engine_lost)

    def _poll(self) -> list[_PendingRollout]:
        """Rollouts with a new completion, which is now part of their episode."""
        wait_seconds = 0.0
        if self._deadline is not None:
            wait_seconds = max(0.0, min(self._deadline - time.monotonic(), _MAX_WAIT_SECONDS))
        answers = self._call_engine(
            lambda: self._generation.poll(wait_seconds=wait_seconds),
            may_restart=self._deadline is not None,
        )
        completed = []
        for name, made in answers or []:
            pending = self._in_flight.pop(name, None)
            if pending is None:
                continue  # given up, and finished in the same moment
            self._num_restarts_in_a_row = 0
            if isinstance(made, KeptCompletion):
                pending.kept = name, made
            else:
                pending.episode.add_completion(
                    CompletionResult(
                        made.token_ids, made.logprobs, made.truncated, made.weight_versions
                    )
                )
            completed.append(pending)
        return completed

    def _step_environment(
        self, completed: Sequence[_PendingRollout], environment: EnvironmentInterface
    ) -> None:
        episodes = [
            (each, each.episode) for each in completed if isinstance(each.episode, MultiTurnEpisode)
        ]
        with self._environment_lock:
            replies = checked_replies(
                environment,
                [list(episode.messages) for _, episode in episodes],
                [episode.metadata for _, episode in episodes],
            )
        with self._lock:
            for (_, episode), reply in zip(episodes, replies, strict=True):
                episode.add_observation(reply)
            # Not those that were retried, or have failed, during the environment's step.
            go_on = [each for each, episode in episodes if each.episode is episode]
            self._submit(
                [each for each in go_on if not each.is_over],
                may_restart=self._deadline is not None,
            )

    def _submit(self, pending: Sequence[_PendingRollout], *, may_restart: bool) -> None:
        if not pending:
            return
        names = [next(self._names) for _ in pending]
        self._in_flight.update(zip(names, pending, strict=True))
        requests = as_batch([each.episode.request() for each in pending])
        self._call_engine(lambda: self._generation.submit(names, requests), may_restart=may_restart)

    def _call_engine(self, call: Callable[[], T], *, may_restart: bool) -> T | None:
        """What a call of the engine returns; None where its worker is lost.

        The worker is then restarted, now or, without `may_restart`, by the next call that may.
        """
        returned = None
        try:
            returned = call()
        except WorkerLostError as lost:
            if not may_restart:
                self._is_engine_lost = True
                return None
            if self._num_restarts_in_a_row == _MAX_RESTARTS_IN_A_ROW:
                raise
            self._num_restarts_in_a_row += 1
            self._generation.restart(lost)
        self._resubmit_after_restart(may_restart=may_restart)
        return returned

    def _resubmit_after_restart(self, *, may_restart: bool) -> None:
        """Submits all requests again if the worker is new, which knows of none."""
        if self._generation.num_restarts > self._num_restarts:
            self._num_restarts, self._is_engine_lost = self._generation.num_restarts, False
            unanswered = list(self._in_flight.values())
            self._in_flight.clear()
            kept = [each for step in self._steps.values() for each in step if each.kept is not None]
            for each in kept:
                each.kept = None
            self._submit([*unanswered, *kept], may_restart=may_restart)

    def _retry(self, missing: Sequence[_PendingRollout]) -> None:
        """Samples rollouts again from their first token, or fails those of the second attempt."""
        names = {id(each): name for name, each in self._in_flight.items()}
        stuck = [names[id(each)] for each in missing if id(each) in names]
        for name in stuck:
            del self._in_flight[name]
        self._call_engine(lambda: self._generation.cancel(stuck), may_restart=True)
        for each in missing:
            if each.num_attempts > 1:
                each.failure = f"no answer within {self._timeout_seconds:g} s, twice"
            else:
                each.num_attempts += 1
                each.episode = self._new_episode(each.prompt, each.place)
        again = [each for each in missing if each.failure is None]
        self._submit(again, may_restart=True)

    def _new_deadline(self) -> float:
        return time.monotonic() + (self._timeout_seconds or _FOREVER)


def _held_rollouts(wanted: Sequence[_PendingRollout], completions: HeldCompletions) -> HeldRollouts:
    """The rollouts of a step.

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


class StreamingSampler(Sampler):
    """A `Sampler` whose engine goes on generating between calls."""

    _engine_class = StreamingGeneration
    generation: StreamingGeneration
    _stream: RolloutStream | None = None

    def stream(
        self, *, seed: int, timeout_seconds: float | None = None, holds: bool = False
    ) -> RolloutStream:
        """Rollouts of steps to come, as `RolloutStream` has it; there is one at a time.

        Where an environment answers, none is held.
        """
        self._close_stream()
        self._stream = RolloutStream(
            self.generation,
            self.engine.episode,
            self.environment,
            seed=seed,
            timeout_seconds=timeout_seconds,
            holds=holds and self.environment is None,
        )
        return self._stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __exit__(self, *exception: object) -> None:
        self._close_stream()
        super().__exit__(*exception)
