"""Reference answers and completions as mathematics, ratios or text, and their comparison."""

import re
from fractions import Fraction
from typing import Any

from nemo_rl_core.environments.rewards.final_answers import (
    after_thinking,
    final_answer,
    is_marked,
    normalized,
)

Reading = str | tuple[Fraction, ...] | list[Any]
"""Text or a time of day; a ratio; or what math-verify parses."""

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_CLOCK = re.compile(r"(\d{1,2}:[0-5]\d(?::[0-5]\d)?)(?:\s*([ap])\.?m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_UNIT = (
    r"(?!\s*(?:and|or)\b)(?:square|cubic|sq\.?|cu\.?)?\s*[A-Za-zµ]{2,}"
    r"(?:\s?/\s?[A-Za-z]+|\s+(?:per|of)\s+[a-z]+)?"
)
_WITH_UNIT = re.compile(
    rf"((?=[-+.]?\d){_NUMBER}(?:/\d+|\\times 10\^\{{[-+]?\d+\}})?)\s*{_UNIT}(?:\s*\^?\{{?[23]\}}?)?"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textrm)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+){0,7}")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}")
_PRODUCT = re.compile(r"[abckmnp-tv-z]{2}|abc|pqr|xyz")
"""Letters that are meant as a product of variables."""
_NAMES = {"pi", "infinity", "inf", "infty", "emptyset"}
_AND = re.compile(r"\s*(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?\s*")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\s*\}?")
_SURROUNDING = " \t\n\"';:*_"
_MOST_CHARACTERS = 60


def equal(answer: str, completion: str) -> bool:
    """Whether the completion's final answer equals the reference.

    Raises:
        ValueError: If the reference cannot be read.
    """
    reference = read_reference(answer)
    found = read_completion(completion)
    return found is not None and _same(reference, found)


def equals_itself(answer: str) -> bool:
    """Whether any completion can be equal to the reference.

    Raises:
        ValueError: If the reference cannot be read.
    """
    reference = read_reference(answer)
    return _same(reference, reference)


def read_reference(answer: str) -> Reading:
    """Reads a reference answer: bare, between dollars, or marked as in a completion.

    Raises:
        ValueError: If it holds no answer.
    """
    text = normalized(answer)
    reading = _read(final_answer(text)) or _parsed(text)
    if reading is None:
        raise ValueError(
            f"math-verify finds no mathematics in the reference answer {answer[:80]!r}"
        )
    return reading


def read_completion(completion: str) -> Reading | None:
    """Reads the final answer of a completion; None if there is none."""
    text = normalized(completion)
    answer = final_answer(text)
    reading = _read(answer) if is_marked(text) or "\n" not in answer else None
    return reading or _parsed(_searched(text, answer))


def _searched(text: str, answer: str) -> str:
    """Where math-verify looks for an answer that cannot be read as a unit."""
    rest = after_thinking(text)
    return rest if "oxed" not in rest and "<answer>" not in rest.lower() else answer


def _read(answer: str) -> Reading | None:
    """Reads an answer of which nothing is left over; None if it is prose or empty."""
    plain = _plain(answer)
    if clock := _CLOCK.fullmatch(_TEXT_COMMAND.sub(r"\1", plain)):
        return " ".join(filter(None, clock.groups())).lower()
    if _RATIO.fullmatch(plain):
        return tuple(Fraction(part) for part in plain.split(":"))
    if with_unit := _WITH_UNIT.fullmatch(plain):
        plain = with_unit[1]
    elif _is_text(plain):
        return " ".join(plain.casefold().split())
    if not plain or _PROSE.search(_TEXT_COMMAND.sub("", plain)):
        return None
    return _parsed(f"${_latex(plain)}$") or _as_written(plain)


def _plain(answer: str) -> str:
    r"""An answer without what surrounds it: dollars, `\text`, quotes, brackets, a full stop."""
    plain = answer.strip()
    while True:
        before = plain
        plain = plain.strip(_SURROUNDING).rstrip(".")
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if plain.startswith(opening) and plain.endswith(closing) and len(plain) > 3:
                plain = plain[len(opening) : -len(closing)]
        if text := _TEXT_COMMAND.fullmatch(plain):
            plain = text[1]
        if re.fullmatch(r"\((?:[A-Za-z]|[-\d.]+)\)", plain):
            plain = plain[1:-1]
        plain = plain.removeprefix("$") if plain.count("$") == 1 else plain
        if plain == before:
            return plain


def _is_text(plain: str) -> bool:
    return (
        len(plain) > 1
        and _WORDS.fullmatch(plain) is not None
        and not _PRODUCT.fullmatch(plain)
        and plain.lower() not in _NAMES
    )


def _latex(plain: str) -> str:
    in_radians = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", plain)
    plain = _ANGLE.sub(r"(\\frac{\1\\pi}{180})" if in_radians else r"\1", plain)
    plain = plain.replace("$", "")
    return _AND.sub(", ", plain)


def _as_written(plain: str) -> str | None:
    """An expression that math-verify cannot read, which equals itself alone."""
    squeezed = "".join(plain.split())
    has_name = any(character.isalnum() for character in squeezed)
    return squeezed if has_name and len(squeezed) <= _MOST_CHARACTERS else None


def _parsed(text: str) -> list[Any] | None:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    # What could not be turned into an expression is kept as text.
    return None if all(isinstance(each, str) for each in found) else found


def _same(reference: Reading, found: Reading) -> bool:
    if isinstance(reference, tuple) and isinstance(found, tuple):
        products = zip(reference, found, strict=False)
        return len(reference) == len(found) and all(
            a * found[0] == b * reference[0] for a, b in products
        )
    reference, found = _quotient(reference), _quotient(found)
    if isinstance(reference, list) and isinstance(found, list):
        from math_verify import verify

        options = {"timeout_seconds": None, "raise_on_error": True}
        # An answer may be an inequality where the reference is an interval.
        return bool(verify(reference, found, allow_set_relation_comp=True, **options))
    if isinstance(reference, str) and isinstance(found, str) and ":" in reference:
        time, half_of_day = reference.partition(" ")[::2]
        return found in (reference, time) or (not half_of_day and found.split()[0] == time)
    return reference == found


def _quotient(reading: Reading) -> Reading:
    if isinstance(reading, tuple) and len(reading) == 2 and reading[1]:
        from sympy import Rational

        return [Rational(*reading)]
    return reading


def compare_small_numbers_relatively() -> None:
    """Has math-verify, which compares six decimals, compare four digits of smaller numbers."""
    from math_verify import grader

    compare = grader.sympy_numeric_eq

    def compare_both(a: Any, b: Any, *options: Any) -> bool:
        return bool(compare(a, b, *options)) and not _are_small_and_apart(a, b)

    grader.sympy_numeric_eq = compare_both


def _are_small_and_apart(a: Any, b: Any) -> bool:
    if not all(getattr(each, "is_number", False) for each in (a, b)):
        return False
    try:
        x, y = (complex(each.doit().evalf(15)) for each in (a, b))
    except TypeError:  # an expression without a value
        return False
    largest = max(abs(x), abs(y))
    return largest < 1e-3 and abs(x - y) > 1e-4 * largest
