"""Recorded rollouts as text: a table of steps, and the rollouts of one step."""

import unicodedata
from collections.abc import Sequence

from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.types import Rollout

_HEADER = f"{'step':>6} {'rollouts':>8} {'failed':>6} {'reward':>8} {'tokens':>8} {'turns':>6}"


def listed(records: RolloutRecords) -> str:
    """One line a step: how many rollouts, how many failed, and means over the others.

    Raises:
        DataError: If a file is no such record.
    """
    return "\n".join([_HEADER, *(_line(step, records.load(step)) for step in records.steps())])


def shown(rollout: Rollout) -> str:
    """A rollout as text. Control characters that a model wrote are spelled out, so that no answer
    can move the cursor, colour the screen, or pass for a line of this program.

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
    place = f"group {rollout.group}, sample {rollout.sample}"
    said = rollout.messages or (("user", rollout.prompt.text), ("assistant", rollout.text))
    return "\n".join(
        [
            f"--- prompt {_inert(rollout.prompt.id)}, {place}: {_inert(outcome)}{cut}",
            *(f"{_inert(role)}: {_inert(content)}" for role, content in said),
            f"(answer: {_inert(rollout.prompt.answer)})",
        ]
    )


def shown_step(
    records: RolloutRecords, step: int | None = None, *, failed: bool = False, limit: int = 10
) -> str:
    """The rollouts of one step as text, and how many more there are.

    Args:
        records: Where they are recorded.
        step: By default the last.
        failed: Whether to show only those that failed.
        limit: At most so many.

    Raises:
        DataError: If that step has no record.
    """
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
    counted = valid_rollouts(rollouts)
    means = [
        [each.reward or 0.0 for each in counted],
        [float(len(each.completion.token_ids)) for each in counted],
        [float(max(len(each.turn_rewards), 1)) for each in counted],
    ]
    reward, tokens, turns = (sum(part) / len(part) if part else 0.0 for part in means)
    num_failed = len(rollouts) - len(counted)
    head = f"{step:6d} {len(rollouts):8d} {num_failed:6d}"
    return f"{head} {reward:8.4g} {tokens:8.1f} {turns:6.2f}"


def _inert(text: str) -> str:
    """The text on one line, with control, format and surrogate characters spelled out."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029"
        else character
        for character in text
    )
