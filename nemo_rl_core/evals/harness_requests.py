"""Requests of lm-evaluation-harness: their windows of tokens, and where a completion stops."""

from collections.abc import Sequence
from typing import Any, Protocol


class HarnessRequest(Protocol):
    """The attributes of the harness's `Instance` that are read."""

    @property
    def args(self) -> tuple[Any, ...]:
        """One or two texts, and their options."""
        ...


def windows(
    ids: Sequence[int], *, prefix: int, max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Splits a text into pairs of context and scored tokens; each token is scored once.

    Example:
        >>> windows([1, 2, 3, 4, 5], prefix=0, max_tokens=3)
        [([0], [1, 2]), ([2], [3, 4]), ([3, 4], [5])]
    """
    step = max_tokens - 1
    pairs = []
    for start in range(0, len(ids), step):
        scored = list(ids[start : start + step])
        room = max_tokens - len(scored)
        context = list(ids[max(0, start - room) : start]) if start else [prefix]
        pairs.append((context, scored))
    return pairs


def until(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string.

    Example:
        >>> until("12, so\\nQ: 5", ["Q:", "\\n"])
        '12, so'
    """
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=None)]


def stop_strings_of(options: dict[str, Any]) -> list[str]:
    """The texts at which a request's completion stops, without empty ones."""
    given = options.get("until") or []
    return [stop for stop in ([given] if isinstance(given, str) else given) if stop]
