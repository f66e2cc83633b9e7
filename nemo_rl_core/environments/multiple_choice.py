"""Completions that choose one of several lettered answers."""

import re
import string
from collections.abc import Iterator, Sequence

from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm)\b|[*`$]|(?<!\w)_+|_+(?!\w)")
_ONE = r"[\s(\[{\"']*(?P<first>[A-Za-z])(?![\w'])[)\]}\"']*"
_MORE = r"(?P<more>(?:\s*(?:,|/|&|\bor\b|\band\b)+\s*[(\[]?[A-Z](?![\w'])[)\]]?)*)"
_NOUN = r"(?:answer|option|choice|letter)"
_STATEMENTS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\\boxed\s*\{" + _ONE + _MORE,
        rf"<{_NOUN}>" + _ONE + _MORE,
        # "The correct answer to the question is (B)", "Answer: B", "the answer would be option B".
        rf"\b{_NOUN}s?\b[^.:=\n]{{0,80}}?(?:[:=]|\bis\b|\bare\b|\bbe\b)\s*(?:{_NOUN}\b)?[\s:]*"
        + _ONE
        + _MORE,
        rf"\b(?:choose|chose|pick|select|go with|going with)\s+(?:{_NOUN}\b)?" + _ONE + _MORE,
        rf"(?<![\w']){_ONE}{_MORE}\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b",
    )
]
_PARENTHESISED = re.compile(r"[(\[]\s*([A-Z])\s*[)\]]|^\s*([A-Z])\)", re.MULTILINE)
_LEADING = re.compile(r"\s*\(?([A-Za-z])\)?(?:[.):,\n]|\s*$)")
# "A" before a small word is an article, and "I" a pronoun.
_BARE = re.compile(r"(?<![\w'])(?!A\s+[a-z]|I\s+[a-z])([A-Z])(?![\w'])")


def chosen_letter(completion: str, num_choices: int) -> str | None:
    """The capital letter that a completion settles on, or None.

    1. Where it says so ("the answer is B", "Answer: (b)", "\\boxed{B}", "I choose B", "B is
       correct"), the last time that it does counts; a last statement with several letters
       ("A or B") settles nothing.
    2. Otherwise letters in brackets, then a letter at the very beginning ("B. Paris"), then capital
       letters that stand alone: of the first kind that occurs, all must be the same letter.

    Example:
        >>> chosen_letter("Not A. The answer is (B).", 4), chosen_letter("A or B", 4)
        ('B', None)
    """
    allowed = string.ascii_uppercase[:num_choices]
    text = _DECORATION.sub("", completion)
    statements = list(_statements(text, allowed))
    if statements:
        _, letters = max(statements, key=lambda each: each[0])
        return _only(letters)
    for pattern, search in ((_PARENTHESISED, 0), (_LEADING, 1), (_BARE, 0)):
        matches = [pattern.match(text)] if search else pattern.finditer(text)
        found = {letter.upper() for each in matches if each for letter in each.groups() if letter}
        if found := found & set(allowed):
            return _only(found)
    return None


def _statements(text: str, allowed: str) -> Iterator[tuple[int, set[str]]]:
    """Where each statement's letter is, and all its letters."""
    for pattern in _STATEMENTS:
        for match in pattern.finditer(text):
            first = match["first"]
            after = text[match.end("first") :].lstrip(")]}\"'")
            # A small letter counts only where nothing goes on: "the answer is a number" is none.
            if first.islower() and after[:2].strip() and after[0] not in ".,;:!?<\\\n":
                continue
            letters = {first.upper(), *re.findall(r"\b[A-Z]\b", match["more"])}
            if first.upper() in allowed:
                yield match.start("first"), letters


def _only(letters: set[str]) -> str | None:
    return next(iter(letters)) if len(letters) == 1 else None


class MultipleChoiceScorer(Scorer):
    """1.0 when the letter that the completion chooses is the answer's, else 0.0.

    A completion that chooses none, or contradicts itself, scores 0. A row whose answer is no letter
    is an error.

    Args:
        num_choices: How many letters there are to choose from, beginning with A.
    """

    def __init__(self, *, num_choices: int) -> None:
        self._num_choices = num_choices

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""
        return [self._outcome(rollout) for rollout in rollouts]

    def _outcome(self, rollout: Rollout) -> float | RewardError:
        answer = rollout.prompt.answer.strip().strip("().").upper()
        if len(answer) != 1 or answer not in string.ascii_uppercase[: self._num_choices]:
            return RewardError(
                f"the answer of prompt {rollout.prompt.id!r} is none of the choices",
                expected=f"a letter from A to {string.ascii_uppercase[self._num_choices - 1]}",
                got=repr(rollout.prompt.answer)[:100],
                fix="correct the row, or set environment.num_choices",
            )
        return float(chosen_letter(rollout.text, self._num_choices) == answer)
