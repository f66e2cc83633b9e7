"""Recorded rollouts as text: a table of steps, and the rollouts of one step."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.types import Rollout

_HEADER = f"{'step':>6} {'rollouts':>8} {'failed':>6} {'reward':>8} {'tokens':>8} {'turns':>6}"


def listed(records: RolloutRecords) -> str:
    """Formats one line per step: numbers of rollouts and failures, and means over the others.

    An episode with several training samples is one rollout.
    """
    return "\n".join([_HEADER, *(_line(step, records.load(step)) for step in records.steps())])


def shown(rollout: Rollout) -> str:
    """Formats a rollout as text.

    Control characters that a model wrote are escaped, so that no answer can move the cursor, color
    the screen, or imitate a line of this program.

    Example:
        >>> from nemo_rl_core.types import Completion, Prompt
        >>> prompt = Prompt("7", "1+2=", (1,), "3", "arithmetic")
        >>> print(shown(Rollout(prompt, Completion((2,), (-0.5,), False), "3\\x1b[2J", 1.0)))
        --- prompt 7, group 0, sample 0: reward 1
        user: 1+2=
        assistant: 3\\x1b[2J
        (answer: 3)
    """
    outcome = f"failed: {rollout.error}" if rollout.error is not None else _score(rollout)
    cut = ", truncated" if rollout.completion.truncated else ""
    indices = f"group {rollout.group}, sample {rollout.sample}"
    indices += f", part {rollout.part}" if rollout.part else ""
    messages = rollout.messages or (
        {"role": "user", "content": rollout.prompt.text},
        {"role": "assistant", "content": rollout.text},
    )
    return "\n".join(
        [
            f"--- prompt {_inert(rollout.prompt.id)}, {indices}: {_inert(outcome)}{cut}",
            *(f"{_inert(turn['role'])}: {_inert(_text(turn))}" for turn in messages),
            f"(answer: {_inert(rollout.prompt.answer)})",
        ]
    )


def shown_step(
    records: RolloutRecords, step: int | None = None, *, failed: bool = False, limit: int = 10
) -> str:
    """Formats the rollouts of one step as text, with the number of rollouts that are left out."""
    rollouts = records.load(step if step is not None else max(records.steps(), default=1))
    if failed:
        rollouts = [rollout for rollout in rollouts if rollout.error is not None]
    hidden = len(rollouts) - limit
    more = [f"--- {hidden} more (--limit {len(rollouts)})"] if hidden > 0 else []
    return "\n\n".join([*map(shown, rollouts[:limit]), *more])


def _score(rollout: Rollout) -> str:
    words = "no reward yet" if rollout.reward is None else f"reward {rollout.reward:.6g}"
    if len(rollout.turn_rewards) > 1:
        words += f" ({' + '.join(f'{value:.6g}' for value in rollout.turn_rewards)})"
    return words


def _line(step: int, rollouts: Sequence[Rollout]) -> str:
    counted = [each for each in rollouts if each.error is None]
    sums = [
        sum(each.reward or 0.0 for each in counted if each.part == 0),
        float(sum(len(each.completion.token_ids) for each in counted)),
        float(sum(max(len(each.turn_rewards), 1) for each in counted)),
    ]
    num_episodes = sum(each.part == 0 for each in rollouts)
    num_failed = num_episodes - sum(each.part == 0 for each in counted)
    reward, tokens, turns = (each / max(num_episodes - num_failed, 1) for each in sums)
    head = f"{step:6d} {num_episodes:8d} {num_failed:6d}"
    return f"{head} {reward:8.4g} {tokens:8.1f} {turns:6.2f}"


def _text(turn: Mapping[str, Any]) -> str:
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())
    ]
    parts = [turn.get("reasoning_content"), turn["content"], *calls]
    return "\n".join(part for part in parts if part)


def _inert(text: str) -> str:
    """Returns the text on one line, with control, format and surrogate characters escaped."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029"
        else character
        for character in text
    )
