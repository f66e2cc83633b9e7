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
        state: "cached" if its artifact existed, "stopped" if it was interrupted.
        peak_memory_gib: Peak memory of all its processes, summed.
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
    """The running stage has resumed after `step`, numbered over the full run like `global_step`."""

    step: int


@dataclass(frozen=True, slots=True)
class StageSaved:
    """The running stage has saved a checkpoint of `step`, numbered like `global_step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait of the run has started, ended, or made progress.

    Attributes:
        text: Description, such as "starting Ray"; empty when the wait is over.
        unit: Unit of both amounts: "bytes" or a plural noun; empty without an amount.
    """

    text: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class MachineSample:
    """The load of the machine at one second of the run, by names that end with the unit."""

    second: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ArtifactMade:
    """The running stage has made an artifact in the store; not published for a cached one."""

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
    """Calls `subscriber` with every event, on the publishing thread; returns how to unsubscribe."""
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

    A subscriber that raises (such as for a closed terminal) is unsubscribed and logged, since a
    display must never end a run.
    """
    with _lock:
        subscribers = tuple(_subscribers)
    # Outside of the lock: a subscriber may log and so take a log handler's lock, while another
    # thread that has that lock publishes.
    for subscriber in subscribers:
        try:
            subscriber(event)
        except Exception:
            unsubscribe(subscriber)
            logger.info("a display failed and is switched off", exc_info=True)


@contextmanager
def labeled(label: str) -> Iterator[None]:
    """Adds a label to the stage's name in reports, to distinguish equal stages of a run.

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
