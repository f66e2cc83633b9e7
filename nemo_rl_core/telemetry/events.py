"""Events of a run: trainers and stages publish them, displays and trackers subscribe."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.types import StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage has started."""

    name: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage has ended: one line of the table at the end of a run.

    Attributes:
        name: Name of the stage, with the iteration if it has one.
        state: "cached" if its artifact existed, "stopped" if it was ended from outside.
        seconds: Wall seconds in this run.
        tokens: Tokens generated and trained on.
        peak_memory_gib: Peak memory of all its processes, summed.
        note: A short summary, such as an accuracy.
        cost: Cost in this run; zero if the artifact existed.
    """

    name: str
    state: Literal["ran", "cached", "failed", "stopped"]
    seconds: float
    tokens: int = 0
    peak_memory_gib: float = 0.0
    note: str = ""
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text for the display."""

    text: str


@dataclass(frozen=True, slots=True)
class StageResumed:
    """The running stage has resumed from a save of an earlier run.

    Attributes:
        step: The last finished step, counted over the whole run like `global_step`.
    """

    step: int


@dataclass(frozen=True, slots=True)
class StageSaved:
    """The running stage has written a checkpoint, from which another run can go on.

    Attributes:
        step: The last finished step, counted over the whole run like `global_step`.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the run waits for has changed, or has come further.

    Attributes:
        text: Such as "starting Ray"; empty when the wait is over.
        done: How much of it is done.
        total: The amount when it is over; None where that is not known.
        unit: Of both: "bytes", or a noun in the plural; empty without an amount.
    """

    text: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class MachineSample:
    """The load of the machine at one second of the run.

    Attributes:
        second: Seconds since the start of the run.
        figures: Values by name; names end with the unit: `memory_used_gib`.
    """

    second: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ArtifactMade:
    """The running stage has made an artifact; not published for a cached one.

    Attributes:
        folder: Its folder in the store.
    """

    folder: Path


Event = (
    StageStarted
    | StageRecord
    | StageResumed
    | StageSaved
    | StepReport
    | Waiting
    | Note
    | MachineSample
    | ArtifactMade
)
Subscriber = Callable[[Event], None]

_subscribers: list[Subscriber] = []
_labels: list[str] = []
_lock = threading.Lock()


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Calls `subscriber` with every event from now on, on the thread that publishes it.

    Returns:
        The function that unsubscribes it.
    """
    with _lock:
        _subscribers.append(subscriber)
    return lambda: unsubscribe(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Ends a subscription; does nothing if there is none."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)


def publish(event: Event) -> None:
    """Calls every subscriber with an event.

    A subscriber that raises (such as for a closed terminal) is unsubscribed and logged: a display
    must never end a run.
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


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Within it, reports name the stage with a label, so that equal stages of a run stay apart.

    Example: `grpo_iteration 1 (seed 0, learning_rate 0.0002)`
    """
    _labels.append(label)
    try:
        yield
    finally:
        _labels.remove(label)


def report(step: StepReport) -> None:
    """Publishes a trainer's report of a step."""
    publish(replace(step, stage=f"{step.stage} ({', '.join(_labels)})") if _labels else step)
