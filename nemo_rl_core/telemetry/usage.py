"""What this process and its workers have used so far: CPU seconds, tokens, FLOPs.

Whoever hands work to a model counts it here, and whoever starts processes elsewhere says how to
read their CPU time. A stage takes the difference over its work (`Spent`). A worker that dies takes
what it used since the last reading with it.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_core.telemetry.cost import ModelFlops, Phase


@dataclass
class Spent:
    """What was used between two moments; filled when the second has come.

    Attributes:
        cpu_seconds: Of this process, its children that have ended, and the workers.
        generated_tokens: Drawn by engines.
        trained_tokens: Of sequences that went forward and backward, prompts included.
        flops: See `nemo_rl_core.telemetry.cost`.
    """

    cpu_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    flops: float = 0.0


_lock = threading.Lock()
_total = Spent()
_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()
_seen: dict[str, float] = {}


def count(
    phase: Phase, shape: ModelFlops, lengths: Sequence[int], *, num_generated: int = 0
) -> None:
    """Adds work on whole sequences.

    Args:
        phase: What was done with them.
        shape: Of the model.
        lengths: Tokens of each sequence, prompt and completion.
        num_generated: How many of them were drawn.
    """
    with _lock:
        _total.flops += shape.flops(phase, lengths)
        _total.generated_tokens += num_generated
        _total.trained_tokens += sum(lengths) if phase == "training" else 0


class Owner(Protocol):
    """Has processes elsewhere."""

    def cpu_seconds(self) -> Mapping[str, float]:
        """CPU seconds by process, each since the process began."""


def watch(owner: Owner) -> None:
    """Reads the owner's processes, too, until `unwatch` or until nobody holds it."""
    _owners.add(owner)


def unwatch(owner: Owner) -> None:
    """Reads the owner's processes a last time; a no-op where they are not watched."""
    if owner in _owners:
        _owners.discard(owner)
        _seen.update(owner.cpu_seconds())


def cpu_seconds() -> float:
    """User and system time of this process, its ended children, and all workers."""
    for owner in list(_owners):
        _seen.update(owner.cpu_seconds())
    own = os.times()
    return sum(own[:4]) + sum(_seen.values())


@contextmanager
def measured() -> Iterator[Spent]:
    """What is used inside; a worker that begins inside counts from its birth."""
    spent = Spent()
    before, start = Spent(**vars(_total)), cpu_seconds()
    yield spent
    spent.cpu_seconds = cpu_seconds() - start
    spent.generated_tokens = _total.generated_tokens - before.generated_tokens
    spent.trained_tokens = _total.trained_tokens - before.trained_tokens
    spent.flops = _total.flops - before.flops
