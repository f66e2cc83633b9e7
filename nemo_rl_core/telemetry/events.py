"""Events of a run: trainers and stages publish them without knowing whether anything shows them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.types import StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins."""

    name: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage has ended: one line of the table at the end of a run.

    Attributes:
        name: The stage's, with the iteration where it has one.
        state: "cached" when its artifact was there already.
        seconds: Wall seconds it took in this run.
        tokens: How many it generated and trained on.
        peak_memory_gib: Of all its processes, summed.
        note: A short remark, such as an accuracy.
        cost: Of what it made in this run; nothing where that was there already.
    """

    name: str
    state: Literal["ran", "cached", "failed"]
    seconds: float
    tokens: int = 0
    peak_memory_gib: float = 0.0
    note: str = ""
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True)
class Note:
    """A line for whoever watches the run."""

    text: str


@dataclass(frozen=True, slots=True)
class StageResumed:
    """The stage that runs goes on from what an earlier run saved.

    Attributes:
        step: The last step that is done already, counted over the whole run as `global_step` is.
    """

    step: int


@dataclass(frozen=True, slots=True)
class MachineSample:
    """What the machine was doing at some second of the run.

    Attributes:
        second: Since the run began.
        figures: By name, with the unit at its end: `memory_used_gib`.
    """

    second: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ArtifactMade:
    """The stage that runs has made an artifact; one that it finds made already is not told.

    Attributes:
        folder: Where it lies in the store.
    """

    folder: Path


Event = StageStarted | StageRecord | StageResumed | StepReport | Note | MachineSample | ArtifactMade
Subscriber = Callable[[Event], None]

_subscribers: list[Subscriber] = []
_lock = threading.Lock()


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Calls `subscriber` with every event from now on, on the thread that publishes it.

    Returns:
        What ends that.
    """
    with _lock:
        _subscribers.append(subscriber)
    return lambda: unsubscribe(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Ends a subscription; nothing happens when there is none."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)


def publish(event: Event) -> None:
    """Hands an event to every subscriber; nothing happens when there is none.

    A subscriber that raises (a terminal that went away) is dropped and named in the log: showing
    a run must never end it.
    """
    with _lock:
        subscribers = tuple(_subscribers)
    # Called outside the lock: a subscriber may log, which takes the lock of a log handler, while
    # another thread that logs holds that one and publishes.
    for subscriber in subscribers:
        try:
            subscriber(event)
        except Exception:
            unsubscribe(subscriber)
            logger.info("a display failed and is switched off", exc_info=True)


def report(step: StepReport) -> None:
    """Publishes what a trainer says after a step."""
    publish(step)
