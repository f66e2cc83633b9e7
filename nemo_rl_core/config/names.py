"""Errors for unknown names, with a suggestion if one is clearly meant.

A wrong suggestion is worse than none. So a name is suggested only if it differs by typing slips,
word by word: `lerning_rate`, but neither `min_tokens` for `max_tokens` nor `top_p` for `top_k`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from nemo_rl_core.errors import ConfigError, NemoRLError

_MAX_SLIPS: Final = 2
_MAX_LISTED_WITH_HINTS: Final = 30
_SHORT: Final = 3
_LONG: Final = 8


def closest_name(name: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that `name` is a misspelling of; None if there is none, or several.

    Example:
        >>> closest_name("lerning_rate", ["learning_rate", "num_steps"])
        'learning_rate'
        >>> closest_name("min_tokens", ["max_tokens"]) is None
        True
    """
    slips = {choice: _num_slips(name, choice) for choice in choices if choice != name}
    fewest = min(slips.values(), default=_MAX_SLIPS + 1)
    closest = [choice for choice, number in slips.items() if number == fewest]
    return closest[0] if len(closest) == 1 and fewest <= _MAX_SLIPS else None


def unknown_names(
    problem: str,
    names: Sequence[str],
    choices: Collection[str],
    *,
    otherwise: str,
    elsewhere: Callable[[str], str | None] | None = None,
    expected: str | None = None,
    error: type[NemoRLError] = ConfigError,
) -> NemoRLError:
    """Returns one error for all unknown names.

    Args:
        problem: Start of the message, such as "there is no preset"; the names follow.
        names: The unknown names.
        choices: The names that exist.
        otherwise: The fix if no choice is clearly meant.
        elsewhere: Returns a sentence on a name of another framework; used before a suggestion.
        expected: Text instead of the list of choices, if that is too long.
        error: The class of the error.

    Example:
        >>> print(unknown_names("there is no preset", ["dapoo"], ["dapo"], otherwise="choose one"))
        there is no preset 'dapoo'
          expected: one of dapo
          got: dapoo
          fix: did you mean 'dapo'?
    """
    peer_hint = elsewhere or (lambda _: None)
    hints = {name: peer_hint(name) or name_hint(name, choices) or otherwise for name in names}
    # Dozens of choices would hide the hints.
    listed = len(choices) <= _MAX_LISTED_WITH_HINTS or otherwise in hints.values()
    choices_text = f"one of {', '.join(choices)}" if listed else None
    fixes = [f"{name!r}: {hint}" if len(names) > 1 else hint for name, hint in hints.items()]
    return error(
        f"{problem} {', '.join(map(repr, names))}",
        expected=expected or choices_text,
        got=", ".join(names),
        fix="; ".join(fixes),
    )


def name_hint(name: str, choices: Iterable[str]) -> str | None:
    """Returns a sentence with the name that is clearly meant, or None."""
    meant = closest_name(name, choices)
    return f"did you mean {meant!r}?" if meant else None


def _num_slips(name: str, choice: str) -> int:
    """Counts slips apart from case and separators; more than `_MAX_SLIPS` for different names."""
    ours, theirs = _words(name), _words(choice)
    if len(ours) != len(theirs):
        return 0 if "".join(ours) == "".join(theirs) else _MAX_SLIPS + 1
    return sum(_word_slips(one, other) for one, other in zip(ours, theirs, strict=True))


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _word_slips(one: str, other: str) -> int:
    """Counts the slips between two words; stricter for short words and for digits."""
    if one == other:
        return 0
    longest = max(len(one), len(other))
    swapped_or_missing = sorted(one) == sorted(other) or len(one) != len(other)
    digits_differ = re.sub(r"\D", "", one) != re.sub(r"\D", "", other)
    if digits_differ or longest < _SHORT or (longest == _SHORT and not swapped_or_missing):
        return _MAX_SLIPS + 1
    allowed = _MAX_SLIPS if longest >= _LONG else 1
    slips = _edit_distance(one, other)
    return slips if slips <= allowed else _MAX_SLIPS + 1


def _edit_distance(one: str, other: str) -> int:
    """Returns the optimal string alignment distance (Damerau, 1964) of two words."""
    previous: list[int] = []
    last = list(range(len(other) + 1))
    for row, a in enumerate(one, 1):
        now = [row]
        for column, b in enumerate(other, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (a != b))
            swapped = row > 1 and column > 1 and a == other[column - 2] and b == one[row - 2]
            now.append(min(cost, previous[column - 2] + 1) if swapped else cost)
        previous, last = last, now
    return last[-1]
