"""Cards of completions for the template: equal answers folded, bars, turns, parts of the reward."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.ui.completions import Card, Source
from nemo_rl_core.ui.turns import Turn, messages_of, sampled_turns, turns


@dataclass(frozen=True)
class Bar:
    """A bar from zero to a value; `left` and `width` are percentages of its track."""

    value: float | None
    left: float = 0.0
    width: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Equal completions of one prompt.

    Attributes:
        row: The first of them.
        samples: Numbers of all of them.
        part: Number among the parts of its episode, from 1; None if there is only one.
        repeated: Turns after the prompt that the previous part of the episode has, too.
        turns: The turns after them.
        turn_rewards: Rewards of the sampled turns.
        parts: Name and value of the parts of the reward.
    """

    row: dict[str, Any]
    samples: list[int]
    reward: Bar
    advantage: Bar
    part: int | None
    repeated: list[Turn]
    turns: list[Turn]
    turn_rewards: list[Bar]
    parts: list[tuple[str, float]]

    @property
    def num_calls(self) -> int:
        """Number of calls of tools in `turns`."""
        return sum(piece.kind == "call" for turn in self.turns for piece in turn.pieces)


@dataclass(frozen=True)
class PromptReading:
    """A prompt with its answers.

    Attributes:
        opening: Turns of the prompt.
        strip: A bar for the reward of every sample, also of those that do not pass the filter.
        others: Completions of the same prompt in the evaluation that is compared.
    """

    source: Source
    first: dict[str, Any]
    opening: list[Turn]
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
    def has_turns(self) -> bool:
        """Whether an answer has several turns."""
        return any(len(answer.turns) + len(answer.repeated) > 1 for answer in self.answers)

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
            turns(opening := _opening(card.rows[0])),
            _answers(card, opening, names, (rewards, advantages)),
            [_bar(reward, rewards) for reward in card.rewards],
            sum(not row["part"] for row in card.rows),
            (others or {}).get(str(card.rows[0]["prompt_id"]), []),
        )
        for card in cards
    ]


def _answers(
    card: Card,
    opening: list[dict[str, Any]],
    names: Sequence[str],
    scales: Sequence[tuple[float, float]],
) -> list[Answer]:
    divided = {row["sample"] for row in card.rows if row["part"]}
    scale = _scale([reward for row in card.rows for reward in _turn_rewards(row)])
    answers: list[Answer] = []
    earlier: tuple[object, list[dict[str, Any]]] = (None, [])
    for rows in _folded(card.rows, divided):
        row = rows[0]
        messages, rewards = _messages(row), _turn_rewards(row)
        start = len(opening) if messages[: len(opening)] == opening else 0
        is_continued = bool(row["part"]) and row["sample"] == earlier[0]
        shared = max(start, _num_shared(messages, earlier[1]) if is_continued else 0)
        earlier = (row["sample"], messages)
        every = turns(messages, rewards)
        answers.append(
            Answer(
                row,
                [each["index"] if each["sample"] is None else each["sample"] for each in rows],
                _bar(row["reward"], scales[0]),
                _bar(row["advantage"], scales[1]),
                (row["part"] or 0) + 1 if row["sample"] in divided else None,
                every[start:shared],
                every[shared:],
                [_bar(reward, scale) for reward in rewards],
                _parts(row["components"], names),
            )
        )
    return answers


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the conversation of a row; of one without turns, the prompt and the completion."""
    if messages := messages_of(row["messages"]):
        return messages
    if conversation := messages_of(row["prompt"]):
        return [*conversation, {"role": "assistant", "content": row["completion"]}]
    texts = [{"role": name, "content": row[name]} for name in ("prompt", "completion")]
    return [each for each in texts if each["content"] is not None]


def _opening(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the turns before the first sampled one."""
    messages = _messages(row)
    if not messages_of(row["messages"]):
        return messages[:-1]
    roles = [each["role"] for each in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return messages[: next(iter(sampled_turns(messages, len(_turn_rewards(row)))), first)]


def _turn_rewards(row: Mapping[str, Any]) -> list[float]:
    return row["turn_rewards"] or []


def _num_shared(messages: Sequence[object], others: Sequence[object]) -> int:
    """Returns how many turns two conversations have in common at their beginning."""
    equal = [one == other for one, other in zip(messages, others, strict=False)]
    return [*equal, False].index(False)


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


def _folded(
    rows: Sequence[dict[str, Any]], divided: Collection[object]
) -> list[list[dict[str, Any]]]:
    """Joins rows with the same texts and results, except those of episodes with several parts."""
    equal: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts = (row[name] for name in ("completion", "messages", "reward", "error", "truncated"))
        episode = row["index"] if row["sample"] in divided else None
        key = json.dumps([*parts, row["mode"], episode], default=str)
        equal.setdefault(key, []).append(row)
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


def _parts(components: object, names: Sequence[str]) -> list[tuple[str, float]]:
    if not isinstance(components, list):
        return []
    if len(names) != len(components):
        names = [f"part {number}" for number, _ in enumerate(components, 1)]
    return list(zip(names, components, strict=True))
