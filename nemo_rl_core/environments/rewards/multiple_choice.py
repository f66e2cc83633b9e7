"""Completions that choose one of several lettered answers."""

import re
import string
from collections.abc import Iterator, Sequence

from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.rewards.final_answers import after_thinking
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout

_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm)\b|[*`$]|(?<!\w)_|_(?!\w)")
# Every repetition is bounded: a megabyte of brackets must not take a megabyte squared.
_ONE = r"[\s(\[{\"']{0,6}(?P<first>[A-Za-z])(?![\w'])[)\]}\"']{0,6}"
_MORE = r"(?P<more>(?:\s{0,2}(?:,|/|&|\bor\b|\band\b){1,2}\s{0,2}[(\[]?[A-Z](?![\w'])[)\]]?){0,9})"
_NOUN = r"(?:answer|option|choice|letter)"
_STATEMENTS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\\boxed\s{0,3}\{" + _ONE + _MORE,
        rf"<{_NOUN}>" + _ONE + _MORE,
        # "The correct answer to the question is (B)", "Answer: B", "the answer would be option B".
        rf"\b{_NOUN}s?\b[^.:=\n]{{0,80}}?(?:[:=]|\bis\b|\bare\b|\bbe\b)"
        + rf"\s{{0,6}}(?:{_NOUN}\b)?[\s:]{{0,6}}"
        + _ONE
        + _MORE,
        rf"\b(?:choose|chose|pick|select|go with|going with)\s{{1,6}}(?:{_NOUN}\b)?" + _ONE + _MORE,
        rf"(?<![\w']){_ONE}{_MORE}\s{{1,3}}is\s{{1,3}}(?:the\s{{1,3}})?"
        + r"(?:correct|right|best|answer)\b",
    )
]
_NEGATED = re.compile(
    r"\b(?i:not|isn't|neither|nor)\s{1,3}(?i:option|choice|answer)?\s{0,3}[(\[]?[A-Z]\b[)\]]?"
    r"(?:\s{0,3}(?:,|\bor\b|\bnor\b|\band\b)\s{0,3}[(\[]?[A-Z]\b[)\]]?){0,9}"
    r"|[(\[]?\b[A-Z]\b[)\]]?\s{1,3}(?:is|are)\s{1,3}(?:not\b|incorrect\b|wrong\b|false\b)"
)
_AFTER_SMALL = re.compile(r"\s{0,6}\Z|[ \t]{0,6}\n|[)\]}\"'<.,;:!?\\]")
_PARENTHESISED = re.compile(r"[(\[]\s{0,3}([A-Z])\s{0,3}[)\]]|^[ \t]{0,8}([A-Z])\)", re.MULTILINE)
_LEADING = re.compile(r"\s*\(?([A-Za-z])\)?(?:[.):,\n]|\s*$)")
# "A" before a small word is an article, and "I" a pronoun.
_BARE = re.compile(r"(?<![\w'])(?!A\s(?!or\b|and\b)[a-z]|I\s[a-z])([A-Z])(?![\w'])")


def chosen_letter(completion: str, num_choices: int) -> str | None:
    """The capital letter that a completion settles on after its thinking, or None.

    Letters that it rules out ("not A", "A is wrong") do not count.

    1. Where it says so ("the answer is B", "Answer: (b)", "\\boxed{B}", "I choose B", "B is
       correct"), the last time that it does counts; a last statement with several letters
       ("A or B") settles nothing.
    2. Otherwise letters in brackets, then a letter at the very beginning ("B. Paris"), then capital
       letters that stand alone: of the first kind that occurs, all must be the same letter.

    Example:
        >>> chosen_letter("The answer is not A. It is B.", 4), chosen_letter("A or B", 4)
        ('B', None)
    """
    allowed = string.ascii_uppercase[:num_choices]
    text = _NEGATED.sub("", _DECORATION.sub("", after_thinking(completion)))
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
            # A small letter counts only where nothing goes on: "the answer is a number" is none.
            if first.islower() and not _AFTER_SMALL.match(text, match.end("first")):
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

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""
        return [self._outcome(rollout) for rollout in rollouts]

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """The answer, where the row has none."""
        return () if prompt.answer else ("answer",)

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
