"""Reference answers and completions as mathematics, ratios or text, and their comparison."""

import re
from fractions import Fraction
from typing import Any, Final, NamedTuple

from nemo_rl_core.environments.rewards.final_answers import (
    answering_text,
    final_answer,
    is_marked,
    normalized,
)


class Reading(NamedTuple):
    """An answer.

    Attributes:
        value: Text or a time of day; a ratio; or what math-verify parses.
        unit: Unit of measurement, such as `km/h` or `cm2`; empty for other words and for none.
    """

    value: str | tuple[Fraction, ...] | list[Any]
    unit: str = ""


_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_CLOCK = re.compile(r"(\d{1,2}:[0-5]\d(?::[0-5]\d)?)(?:\s*([ap])\.?m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"\d{1,30}(?:\.\d{1,30})?(?:\s?:\s?\d{1,30}(?:\.\d{1,30})?)+")
_UNIT = (
    r"(?!\s*(?:and|or)\b)(?P<unit>(?:square|cubic|sq\.?|cu\.?)?\s*"
    r"(?:[A-Za-zµ]{2,}|[ACJKLNVW]|[a-z](?=\s?/\s?[a-z]))(?:\s?/\s?[A-Za-z]+|\s+(?:per|of)\s+[a-z]+)?"
    r"(?:\s*\^?\{?[23]\}?)?)"
)
_MEASURED = rf"((?=[-+.]?\d){_NUMBER}(?:/\d+|\\times 10\^\{{[-+]?\d+\}})?)\s*"
_WITH_UNIT = re.compile(_MEASURED + _UNIT)
_WITH_LETTER = re.compile(
    _MEASURED + r"(?:\\[ ,;])*\s*\\(?:text|mathrm)\s*\{(?P<unit>\s*[a-zA-Z]\s*)\}(?:\^\{?[23]\}?)?"
)
_MEASURES: Final = {
    name: names.split()[0]
    for names in (
        *("m meter meters metre metres", "cm centimeter centimeters", "mm millimeter millimeters"),
        *("km kilometer kilometers", "g gram grams", "kg kilogram kilograms", "mg milligram"),
        *("s sec second seconds", "min minute minutes", "h hr hrs hour hours", "day days"),
        *("week weeks", "month months", "year years", "ft foot feet", "in inch inches"),
        *("mi mile miles", "yd yard yards", "lb lbs pound pounds", "oz ounce ounces"),
        *("L l liter liters litre litres", "mL ml milliliter", "dollar dollars", "cent cents"),
        *("N", "J", "W", "V", "A", "K", "C", "Hz", "Pa", "degree degrees", "radian radians"),
    )
    for name in names.split()
}
"""Units by their names: two different ones are never the same answer."""
_IN_PROSE = re.compile(
    rf"(?<!\d)(?:{_CLOCK.pattern}|{_RATIO.pattern}"
    r"|\d{1,30}(?:\.\d{1,30})?\\times 10\^\{[-+]?\d{1,9}\})"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textrm)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+){0,7}")
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])[A-Za-z]{4,}"
    r"|(?:^|\s)(?!(?:and|or|sin|cos|tan|log|ln|exp|max|min|mod|pi|inf)\b)[A-Za-z]{2,}(?=\s|[,;:!?])"
)
_FORMULA = re.compile(r"\$[^$]*\$")
_WORD = re.compile(r"(?<!\\)\b(?!and\b|or\b)[A-Za-z]{2,}")
_PRODUCT = re.compile(r"[abckmnp-tv-z]{2}|abc|pqr|xyz")
"""Letters that are meant as a product of variables."""
_NAMES = {"pi", "infinity", "inf", "infty", "emptyset"}
_AND = re.compile(r"\s*,?\s*(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?\s*")
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
    reading = _read(final_answer(text)) or _searched(text)
    if reading is None:
        raise ValueError(
            f"math-verify finds no mathematics in the reference answer {answer[:80]!r}"
        )
    return reading


def read_completion(completion: str) -> Reading | None:
    """Reads the final answer of a completion; None if there is none."""
    text = answering_text(completion)
    answer = final_answer(text)
    reading = _read(answer) if is_marked(text) or "\n" not in answer else None
    return reading or _searched(answer)


def _searched(text: str) -> Reading | None:
    """Finds an answer in prose; the last time, ratio or power of ten is not cut to a number."""
    matches = list(_IN_PROSE.finditer(text))
    if matches and not re.search(r"\d", text[matches[-1].end() :]):
        return _read(matches[-1][0])
    parsed = _parsed(text)
    return None if parsed is None else Reading(parsed)


def _read(answer: str) -> Reading | None:
    """Reads an answer of which nothing is left over; None if it is prose or empty."""
    plain = _plain(answer)
    words = _TEXT_COMMAND.sub(r"\1", plain)
    if clock := _CLOCK.fullmatch(words):
        return Reading(" ".join(filter(None, clock.groups())).lower())
    if _RATIO.fullmatch(plain):
        return Reading(tuple(Fraction(part) for part in plain.split(":")))
    unit = ""
    spaced = words.replace("\\ ", " ").replace("\\,", " ")
    if with_unit := _WITH_UNIT.fullmatch(spaced) or _WITH_LETTER.fullmatch(plain):
        plain, unit = with_unit[1], _measure(with_unit["unit"])
    elif _is_text(plain):
        return Reading(" ".join(plain.casefold().split()))
    if not plain or _is_prose(plain):
        return None
    value = _parsed(f"${_latex(plain)}$") or _as_written(plain)
    return None if value is None else Reading(value, unit)


def _measure(unit: str) -> str:
    """The unit by its first name, with its power; empty if a part of it does not measure."""
    power = "2" if unit.startswith("sq") else "3" if unit.startswith("cu") else ""
    power += "".join(re.findall(r"\d", unit))
    names = re.findall(r"[A-Za-zµ]+", re.sub(r"^(?:square|cubic|sq|cu)\b|\bper\b", " ", unit))
    known = [_MEASURES.get(name, _MEASURES.get(name.lower(), "")) for name in names]
    return "/".join(known) + power if all(known) else ""


def _is_prose(plain: str) -> bool:
    outside = _FORMULA.sub(" ", plain) if "$" in plain else ""
    return bool(_PROSE.search(_TEXT_COMMAND.sub("", plain)) or _WORD.search(outside))


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
    if len(plain) == 1 or not _WORDS.fullmatch(plain) or plain.lower() in _NAMES:
        return False
    parts = [part.strip() for part in plain.split("-")]
    return not all(len(part) == 1 or _PRODUCT.fullmatch(part) for part in parts)


def _latex(plain: str) -> str:
    in_radians = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", plain)
    plain = _ANGLE.sub(r"(\\frac{\1\\pi}{180})" if in_radians else r"\1", plain)
    plain = plain.replace("$", "")
    return _AND.sub(", ", plain)


def _as_written(plain: str) -> str | None:
    """An expression that math-verify cannot read, which equals only itself."""
    squeezed = "".join(plain.split())
    has_name = any(character.isalnum() for character in squeezed)
    return squeezed if has_name and len(squeezed) <= _MOST_CHARACTERS else None


def _parsed(text: str) -> list[Any] | None:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    # What could not be turned into an expression is kept as text.
    return None if all(isinstance(each, str) for each in found) else found


def _same(reference: Reading, found: Reading) -> bool:
    if reference.unit and found.unit and reference.unit != found.unit:
        return False
    gold, said = reference.value, found.value
    if isinstance(gold, tuple) and isinstance(said, tuple):
        return len(gold) == len(said) and all(
            a * said[0] == b * gold[0] for a, b in zip(gold, said, strict=True)
        )
    gold, said = _quotient(gold), _quotient(said)
    if isinstance(gold, list) and isinstance(said, list):
        from math_verify import verify

        options = {"timeout_seconds": None, "raise_on_error": True}
        # An answer may be an inequality where the reference is an interval.
        return bool(verify(gold, said, allow_set_relation_comp=True, **options))
    if isinstance(gold, str) and isinstance(said, str) and ":" in gold:
        time, half_of_day = gold.partition(" ")[::2]
        return said in (gold, time) or (not half_of_day and said.split()[0] == time)
    return gold == said


def _quotient(value: str | tuple[Fraction, ...] | list[Any]) -> str | list[Any] | tuple[Any, ...]:
    if isinstance(value, tuple) and len(value) == 2 and value[1]:
        from sympy import Rational

        return [Rational(*value)]
    return value


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
