"""Recorded rollouts, to look at: `python -m nemo_rl_core.rollouts list|show FOLDER`."""

import argparse
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.rollouts.quarantine import judged
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


def _score(rollout: Rollout) -> str:
    words = "no reward yet" if rollout.reward is None else f"reward {rollout.reward:.6g}"
    if len(rollout.turn_rewards) > 1:
        words += f" ({' + '.join(f'{value:.6g}' for value in rollout.turn_rewards)})"
    return words


def _line(step: int, rollouts: Sequence[Rollout]) -> str:
    counted = judged(rollouts)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists the recorded steps of a training, or shows rollouts of one.

    Returns:
        The exit code: 0, or 1 after an error that has been explained.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_core.rollouts",
        description="Look at recorded rollouts: the folder `rollouts` of a training artifact.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="one line a step").add_argument("folder", type=Path)
    show = commands.add_parser("show", help="the rollouts of one step")
    show.add_argument("folder", type=Path)
    show.add_argument("--step", type=int, help="by default the last")
    show.add_argument("--failed", action="store_true", help="only those that were not judged")
    show.add_argument("--limit", type=int, default=10, help="at most so many")
    given = parser.parse_args(arguments)
    records = RolloutRecords(given.folder)
    try:
        text = listed(records) if given.command == "list" else _chosen(records, given)
    except NemoRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


def _chosen(records: RolloutRecords, given: argparse.Namespace) -> str:
    step = given.step if given.step is not None else max(records.steps(), default=1)
    rollouts = records.load(step)
    if given.failed:
        rollouts = [rollout for rollout in rollouts if rollout.error is not None]
    hidden = len(rollouts) - given.limit
    more = [f"--- {hidden} more (--limit {len(rollouts)})"] if hidden > 0 else []
    return "\n\n".join([*map(shown, rollouts[: given.limit]), *more])


if __name__ == "__main__":
    sys.exit(main())
