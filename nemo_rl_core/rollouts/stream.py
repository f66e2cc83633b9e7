"""Rollouts of several steps under way at once, for a trainer that does not wait for its engine.

A thread of the stream's own collects what the engine has completed, steps the environment, submits
the next requests, and hands out draws that have ended, so that episodes go on, and are scored,
while the model trains. The caller's thread begins steps, takes them, and updates weights. Both use
the engine under one lock; an environment, which may be slow, is called outside of it.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import TypeVar

import torch

from nemo_rl_core.environments.interfaces import EnvironmentInterface
from nemo_rl_core.environments.multi_turn.replies import checked_replies
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.streaming import KeptCompletion, StreamingGeneration
from nemo_rl_core.rollouts.batch import joined
from nemo_rl_core.rollouts.engine import (
    CompletionResult,
    Episode,
    RolloutPlace,
    as_batch,
    held_results,
)
from nemo_rl_core.rollouts.episode import MultiTurnEpisode, played_rollouts
from nemo_rl_core.rollouts.pending import PendingRollout, PendingStep, held_rollouts
from nemo_rl_core.types import Prompt, Rollout

_MAX_WAIT_SECONDS = 1.0
_TURN_POLL_SECONDS, _DRAW_POLL_SECONDS = 0.05, 0.25
"""Before each poll while no caller waits, of turns, which the environment is to answer, and of
single turns, which are only scored: the engine must be free for new weights, and to compute."""
_AWAITED_POLL_SECONDS = 0.001
"""The same while a caller waits in `take`, so that it can see that the wait is over."""
_CLOSE_SECONDS = 5.0
_MAX_RESTARTS_IN_A_ROW = 2
_FOREVER = float("inf")
T = TypeVar("T")
OnDraw = Callable[[int, Sequence[Rollout]], Sequence[Prompt] | None]
"""Gets a step's number and the rollouts of one of its draws; returns the prompts of the next."""


def no_more(step: int, rollouts: Sequence[Rollout]) -> None:
    """An `OnDraw` of steps that need no further draw."""


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
        holds: Whether completions stay where they are made.
        on_draw: Gets the rollouts of each draw of a step as soon as all have ended, mostly in the
            stream's thread, and returns the prompts of the step's next draw, or None where the step
            needs no more. By default no step does. There is one call at a time, which the
            environment may be under way beside.
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
        on_draw: OnDraw = no_more,
    ) -> None:
        self._generation, self._holds = generation, holds
        generation.keeps_completions = holds
        self._new_episode = episode
        self._environment = environment
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._on_draw = on_draw
        self._names = count()
        self._steps: dict[int, PendingStep] = {}
        self._in_flight: dict[int, PendingRollout] = {}
        self._num_restarts = generation.num_restarts
        self._num_restarts_in_a_row = 0
        # Guards all above, the engine, and these: until when a caller waits in `take`, whether one
        # will soon, and what the thread has raised.
        self._lock = threading.Condition()
        self._deadline: float | None = None
        self._polls_next = False
        self._lost: WorkerLostError | None = None
        self._failure: BaseException | None = None
        # Guard the environment and `on_draw`; where several locks are needed, `on_draw`'s is taken
        # first, and that of the engine last.
        self._environment_lock = threading.Lock()
        self._draw_lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        next_version: int | None = None,
    ) -> None:
        """Submits a step's rollouts and returns at once.

        Args:
            prompts: `P` prompts.
            num_generations_per_prompt: G.
            step: Not begun before.
            next_version: Begins them with the weights of this version, which the caller hands to
                the engine next. A lost engine is then left to that.
        """
        may_restart = next_version is None
        with self._lock:
            self._resubmit_after_restart(may_restart=may_restart)
            self._steps[step] = PendingStep(num_generations_per_prompt)
            self._begin_draw(
                step, prompts, may_restart=may_restart, first_version=next_version or 0
            )
            self._lock.notify_all()

    def _begin_draw(
        self, step: int, prompts: Sequence[Prompt], *, may_restart: bool, first_version: int = 0
    ) -> None:
        """Submits further rollouts of a step, whose groups follow those of its draws before."""
        wanted = self._steps[step]
        places = [
            (prompt, RolloutPlace(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=wanted.num_prompts)
            for sample in range(wanted.num_generations_per_prompt)
        ]
        wanted.num_prompts += len(prompts)
        wanted.draw = [PendingRollout(*each, self._new_episode(*each)) for each in places]
        self._submit(wanted.draw, may_restart=may_restart, first_version=first_version)

    def look(self) -> None:
        """Has the thread poll at once, for a caller that will take a step soon; returns at once.

        What has ended since the last poll is then handed out beside what the caller does before.
        """
        with self._lock:
            self._polls_next = self._must_poll()
            self._lock.notify_all()

    def take(self, step: int) -> Sequence[Rollout]:
        """Waits until a step needs no further draw, while those of later steps go on.

        Returns:
            All that were begun, by group and sample; one that never came has an error.

        Raises:
            WorkerLostError: If the engine's worker is lost time and again before it completes
                anything.
            Exception: What `on_draw` has raised for this step.
        """
        with self._lock:
            self._resubmit_after_restart(may_restart=True)  # of what a lost engine has kept, too
            wanted = self._steps[step]
        try:
            while not self._is_drawn(wanted):
                self._end_draws()
        finally:
            with self._lock:
                self._deadline = None
                del self._steps[step]
        if wanted.failure is not None:
            raise wanted.failure
        return joined(wanted.drawn)

    def _rollouts_of(
        self, draw: Sequence[PendingRollout], *, may_restart: bool
    ) -> Sequence[Rollout] | None:
        """The rollouts of a draw, all of which have ended; held ones by reference.

        None where an engine is lost with what it kept: some have then not ended any more.
        """
        if not self._holds:
            return [each.rollout() for each in draw]
        if self._environment is not None:
            return played_rollouts([each.asked for each in draw], [each.played() for each in draw])
        kept = dict(each.kept for each in draw if each.kept is not None)
        completions = self._call_engine(
            partial(self._generation.hand_over, kept), may_restart=may_restart
        )
        return None if completions is None else held_rollouts(draw, completions)

    def _is_drawn(self, wanted: PendingStep) -> bool:
        """Waits until a step needs no further draw; each may take until a deadline of its own.

        Returns:
            False where a draw has ended though the stream's thread did not look: it may wait for a
            reward or for the environment just then, and hand nothing out.
        """
        with self._lock:
            draw, self._deadline = wanted.draw, self._new_deadline()
            self._lock.notify_all()
            while not wanted.is_drawn:
                if self._failure is not None:
                    raise self._failure
                left = self._deadline - time.monotonic()
                if left > 0 and wanted.draw is draw:
                    self._lock.wait(min(left, _MAX_WAIT_SECONDS))
                    continue
                if left <= 0 and wanted.missing:
                    if self._environment is None:
                        self._poll()  # the thread does not while it scores another step's draw
                    self._retry(wanted.missing)
                    if wanted.has_ended_draw:
                        return False
                draw, self._deadline = wanted.draw, self._new_deadline()
            return True

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

    @contextmanager
    def environment_alone(self) -> Generator[None]:
        """Waits until a step of the environment under way has returned, and lets none begin."""
        with self._environment_lock:
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
                    if self._deadline is None:
                        self._lock.wait_for(self._is_urgent, self._pause_seconds)
                    else:
                        self._lock.wait(_AWAITED_POLL_SECONDS)
                    self._polls_next = False
                    if self._is_closed:
                        return
                    completed = self._poll() if self._in_flight else []
                if completed and self._environment is not None:
                    self._step_environment(completed, self._environment)
                self._end_draws()
                with self._lock:
                    self._lock.notify_all()
        # Named fault boundary: an exception in a thread would be lost, and `SystemExit`, as of a
        # user's hook, without a word; `take` raises it.
        except BaseException as error:  # noqa: BLE001 (raised by take)
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    @property
    def _pause_seconds(self) -> float:
        return _DRAW_POLL_SECONDS if self._environment is None else _TURN_POLL_SECONDS

    def _is_urgent(self) -> bool:
        return self._is_closed or self._polls_next or self._deadline is not None

    def _must_poll(self) -> bool:
        """Whether there may be completions, which nobody waits for while the engine is lost."""
        is_awaited = self._deadline is not None
        return bool(self._in_flight or self._ended_draws()) and (is_awaited or self._lost is None)

    def _ended_draws(self) -> list[int]:
        """The steps of draws that `on_draw` has not got yet."""
        return [step for step, wanted in self._steps.items() if wanted.has_ended_draw]

    def _end_draws(self) -> None:
        """Hands out draws that have ended, and begins those that their steps need next."""
        with self._lock:
            ended = self._ended_draws()
        for step in ended:
            with self._lock:
                may_restart = self._deadline is not None
                self._resubmit_after_restart(may_restart=may_restart)  # new engines kept nothing
                wanted = self._steps.get(step)
                if self._is_closed or wanted is None or not wanted.has_ended_draw:
                    continue  # its caller has gone, or an engine was lost with what it kept
                found = self._rollouts_of(wanted.draw, may_restart=may_restart)
                if found is None:
                    continue
                wanted.drawn.append(found)
                wanted.draw = []
            more = None
            try:
                with self._draw_lock:
                    more = self._on_draw(step, found)
            # Named fault boundary: it is the step's, whose turn may not have come.
            except Exception as error:  # noqa: BLE001 (raised by take)
                wanted.failure = error
            with self._lock:
                if more is not None and step in self._steps:
                    self._begin_draw(step, more, may_restart=self._deadline is not None)
                else:
                    wanted.is_drawn = True

    def _poll(self) -> list[PendingRollout]:
        """Rollouts with a new completion, which is now part of their episode."""
        wait_seconds = 0.0
        if self._deadline is not None:
            wait_seconds = max(0.0, min(self._deadline - time.monotonic(), _MAX_WAIT_SECONDS))
        answers = self._call_engine(
            lambda: self._generation.poll(wait_seconds=wait_seconds),
            may_restart=self._deadline is not None,
        )
        completed, turns = [], {}
        for name, made in answers or []:
            pending = self._in_flight.get(name)
            if pending is None:
                continue  # given up, and finished in the same moment
            self._num_restarts_in_a_row = 0
            if isinstance(made, KeptCompletion) and self._environment is not None:
                turns[name] = made
                continue
            del self._in_flight[name]
            if isinstance(made, KeptCompletion):
                pending.kept = name, made
            else:
                pending.episode.add_completion(
                    CompletionResult(
                        made.token_ids, made.logprobs, made.truncated, made.weight_versions
                    )
                )
            completed.append(pending)
        return completed + self._take_turns(turns)

    def _take_turns(self, kept: dict[int, KeptCompletion]) -> list[PendingRollout]:
        """Has engines put turns into the object store, and adds them to their episodes.

        Those of a lost engine stay under way, and are asked for again.
        """
        if not kept:
            return []
        requests = {name: self._in_flight[name].episode.request() for name in kept}
        before = {name: each.before.row for name, each in requests.items() if each.before}
        completions = self._call_engine(
            partial(self._generation.hand_over, kept, before),
            may_restart=self._deadline is not None,
        )
        if completions is None:
            return []
        completed = [self._in_flight.pop(name) for name in kept]
        for pending, turn in zip(completed, held_results(completions), strict=True):
            pending.episode.add_completion(turn)
        return completed

    def _step_environment(
        self, completed: Sequence[PendingRollout], environment: EnvironmentInterface
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

    def _submit(
        self, pending: Sequence[PendingRollout], *, may_restart: bool, first_version: int = 0
    ) -> None:
        # The engine's next user has names from 0 on as well: after a slow reward or environment, a
        # closed stream must not ask for anything under them.
        if not pending or self._is_closed:
            return
        names = [next(self._names) for _ in pending]
        self._in_flight.update(zip(names, pending, strict=True))
        requests = as_batch([each.episode.request() for each in pending])
        # Later turns and further draws come before what later steps have asked for.
        requests["priorities"] = torch.tensor([each.place.step for each in pending])
        submit = partial(self._generation.submit, names, requests, first_version=first_version)
        self._call_engine(submit, may_restart=may_restart)

    def _call_engine(self, call: Callable[[], T], *, may_restart: bool) -> T | None:
        """What a call of the engine returns; None where its worker is lost.

        The worker is then restarted, now or, without `may_restart`, by the next call that may.
        """
        returned = None
        try:
            returned = call()
        except WorkerLostError as lost:
            if not may_restart:
                self._lost = lost
                return None
            if self._num_restarts_in_a_row == _MAX_RESTARTS_IN_A_ROW:
                raise
            self._num_restarts_in_a_row += 1
            self._generation.restart(lost)
        self._resubmit_after_restart(may_restart=may_restart)
        return returned

    def _resubmit_after_restart(self, *, may_restart: bool) -> None:
        """Submits all requests again if the worker is new, which knows of none."""
        is_new = self._generation.num_restarts > self._num_restarts
        if may_restart and self._lost is not None and not is_new:
            # It lives, and was out of reach for one call, with which completions may have gone.
            self._generation.restart(self._lost)
        if self._generation.num_restarts > self._num_restarts:
            self._num_restarts, self._lost = self._generation.num_restarts, None
            unanswered = list(self._in_flight.values())
            self._in_flight.clear()
            kept = [
                each for step in self._steps.values() for each in step.draw if each.kept is not None
            ]
            for each in kept:
                each.kept = None
            self._submit([*unanswered, *kept], may_restart=may_restart)

    def _retry(self, missing: Sequence[PendingRollout]) -> None:
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
