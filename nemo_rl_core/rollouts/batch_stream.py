"""Rollouts of upcoming steps from an engine that completes one batch at a time.

No new weights reach the engine before all begun steps have ended. All tokens of a step therefore
have one version of the weights, and a second run samples the same tokens.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from nemo_rl_core.rollouts.stream import CLOSE_SECONDS, OnDraw
from nemo_rl_core.types import Prompt, Rollout


class RollOut(Protocol):
    """Rolls out prompts of a step."""

    def __call__(
        self, prompts: Sequence[Prompt], *, step: int, first_group: int, while_training: bool
    ) -> Sequence[Rollout]:
        """Returns rollouts of the prompts, whose groups are numbered from `first_group`."""
        ...


class BatchStream(AbstractContextManager["BatchStream"]):
    """Rolls out and scores steps in a thread, one after the other.

    Args:
        roll_out: Called with the prompts of each draw: in the thread, or by `begin`.
        on_draw: Called in the thread with the rollouts of each draw, as in `RolloutStream`.
        waiting: Context in which the caller waits for steps.
    """

    def __init__(
        self,
        roll_out: RollOut,
        on_draw: OnDraw,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._roll_out, self._on_draw, self._waiting = roll_out, on_draw, waiting
        self._steps: dict[int, Future[None]] = {}
        self._begun: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, name="rollouts", daemon=True).start()

    def begin(self, prompts: Sequence[Prompt], *, step: int, while_training: bool) -> None:
        """Begins a step.

        Args:
            while_training: Whether to return at once. Otherwise `begin` samples the first draw, and
                returns while the thread scores it.
        """
        roll_out = partial(self._roll_out, step=step, while_training=while_training)
        first = None
        if not while_training:
            self.finish()  # a score may call the environment, as rollouts do
            first = roll_out(prompts, first_group=0)
        self._steps[step] = Future()
        draw = partial(self._draw, step, prompts, roll_out, first)
        self._begun.put((self._steps[step], draw))

    def finish(self) -> None:
        """Waits until all begun steps need no further draw, or have failed."""
        with self._waiting():
            wait(self._steps.values())

    def take(self, step: int) -> None:
        """Waits for a step, and raises the error that ended it, if any."""
        self._steps.pop(step).result()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Waits for all begun steps; the engine and the environment are then free."""
        self.finish()
        yield

    def environment_alone(self) -> AbstractContextManager[None]:
        """Does nothing: the thread steps the environment and scores in turns."""
        return nullcontext()

    def __exit__(self, *_: object) -> None:
        """Ends the thread; waits only some seconds for an engine or a reward that hangs."""
        self._is_closed = True
        self._begun.put(None)
        wait(self._steps.values(), CLOSE_SECONDS)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            ended, draw = begun
            try:
                draw()
            # Broad on purpose: `take` raises the error for its step.
            except BaseException as error:  # noqa: BLE001 (raised by take)
                ended.set_exception(error)
            else:
                ended.set_result(None)

    def _draw(
        self,
        step: int,
        prompts: Sequence[Prompt],
        roll_out: Callable[..., Sequence[Rollout]],
        rollouts: Sequence[Rollout] | None,
    ) -> None:
        """Scores the first draw, which may be sampled already, and samples and scores the rest."""
        further: Sequence[Prompt] | None = prompts
        num_prompts = 0
        while further is not None and not self._is_closed:
            if rollouts is None:
                rollouts = roll_out(further, first_group=num_prompts)
            num_prompts += len(further)
            further = None if self._is_closed else self._on_draw(step, rollouts)
            rollouts = None
