"""Cards of completions for the template: equal answers folded, bars, turns, parts of the reward."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.ui.completions import Card, Source

_CALL = re.compile(r"(<(tool|tool_call)>.*?</\2>)", re.DOTALL)


@dataclass(frozen=True)
class Bar:
    """A bar from zero to a value; `left` and `width` are percentages of its track."""

    value: float | None
    left: float = 0.0
    width: float = 0.0


@dataclass(frozen=True)
class Turn:
    """A message of a conversation: texts, each with whether it is a call of a tool."""

    role: str
    pieces: list[tuple[str, bool]]
    reward: float | None = None


@dataclass(frozen=True)
class Answer:
    """Equal completions of one prompt.

    Attributes:
        row: The first of them.
        samples: Numbers of all of them.
        parts: Name and value of the parts of the reward.
    """

    row: dict[str, Any]
    samples: list[int]
    reward: Bar
    advantage: Bar
    turns: list[Turn]
    parts: list[tuple[str, float]]


@dataclass(frozen=True)
class PromptReading:
    """A prompt with its answers.

    Attributes:
        strip: A bar for the reward of every sample, also of those that do not pass the filter.
        others: Completions of the same prompt in the evaluation that is compared.
    """

    source: Source
    first: dict[str, Any]
    answers: list[Answer]
    strip: list[Bar]
    num_rows: int
    others: list[dict[str, Any]]

    @property
    def mean(self) -> float | None:
        """Mean reward of all samples; None without a reward."""
        rewards = [bar.value for bar in self.strip if bar.value is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def is_equal(self) -> bool:
        """Whether several samples have the same reward, so that the prompt teaches nothing."""
        values = {bar.value for bar in self.strip}
        return len(self.strip) > 1 and len(values) == 1 and values != {None}


def readings(
    cards: Sequence[Card],
    *,
    names: Sequence[str] = (),
    others: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[PromptReading]:
    """Returns the cards of a page, with bars on a common scale.

    Args:
        names: Names of the parts of the reward.
        others: Completions of another evaluation by prompt.
    """
    rewards = _scale([reward for card in cards for reward in card.rewards])
    advantages = _scale([row["advantage"] for card in cards for row in card.rows])
    return [
        PromptReading(
            card.source,
            card.rows[0],
            [
                Answer(
                    rows[0],
                    [row["sample"] if row["sample"] is not None else row["index"] for row in rows],
                    _bar(rows[0]["reward"], rewards),
                    _bar(rows[0]["advantage"], advantages),
                    _turns(rows[0]),
                    _parts(rows[0]["components"], names),
                )
                for rows in _folded(card.rows)
            ],
            [_bar(reward, rewards) for reward in card.rewards],
            len(card.rows),
            (others or {}).get(str(card.rows[0]["prompt_id"]), []),
        )
        for card in cards
    ]


def part_names(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of a weighted sum's parts in the config of a stage, with their weights."""
    environment = config.get("environment")
    parts = environment.get("parts") if isinstance(environment, dict) else None
    names = []
    for part in parts if isinstance(parts, list) else []:
        scored = part.get("environment", {})
        name = str(scored.get("target", "")).partition(":")[2] or scored.get("kind", "")
        names.append(f"{name} (weight {part.get('weight', 1):g})")
    return names


def _folded(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Joins rows with the same texts and results."""
    equal: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts = (row[name] for name in ("completion", "messages", "reward", "error", "truncated"))
        equal.setdefault(json.dumps([*parts, row["mode"]], default=str), []).append(row)
    return [*equal.values()]


def _scale(values: Sequence[float | None]) -> tuple[float, float]:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return min([0.0, *finite]), max([0.0, *finite])


def _bar(value: float | None, scale: tuple[float, float]) -> Bar:
    low, high = scale
    if value is None or not math.isfinite(value) or low == high:
        return Bar(value)
    # Halves first: the difference of two huge values of opposite sign would overflow.
    span = high / 2 - low / 2
    zero, end = (100 * (edge / 2 - low / 2) / span for edge in (0.0, value))
    return Bar(value, round(min(zero, end), 1), round(abs(end - zero), 1))


def _turns(row: Mapping[str, Any]) -> list[Turn]:
    messages = row["messages"]
    if not isinstance(messages, list):
        return []
    rewards = row["turn_rewards"] or []
    num_turns = sum(message.get("role") == "assistant" for message in messages)
    remaining = iter(rewards if len(rewards) == num_turns else [])
    return [
        Turn(
            str(message.get("role")),
            _pieces(message),
            next(remaining, None) if message.get("role") == "assistant" else None,
        )
        for message in messages
    ]


def _pieces(message: Mapping[str, Any]) -> list[tuple[str, bool]]:
    text, calls = str(message.get("content")), message.get("tool_calls")
    # Each match has two groups: the call with its marks, and the name of the mark.
    split = _CALL.split(text)
    pieces = [piece for index, piece in enumerate(split) if index % 3 != 2 and piece.strip()]
    return [(piece, _CALL.fullmatch(piece) is not None) for piece in pieces] + [
        (json.dumps(call.get("function"), ensure_ascii=False), True)
        for call in (calls if isinstance(calls, list) else [])
    ] or [(text, False)]


def _parts(components: object, names: Sequence[str]) -> list[tuple[str, float]]:
    if not isinstance(components, list):
        return []
    if len(names) != len(components):
        names = [f"part {number}" for number, _ in enumerate(components, 1)]
    return list(zip(names, components, strict=True))
