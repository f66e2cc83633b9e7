"""Reads and compares reference answers and completions as mathematics, ratios or text."""

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, NamedTuple

from nemo_rl_core.environments.rewards.final_answers import (
    answering_text,
    final_answer,
    is_marked,
    is_ruled_out,
    normalized,
)


class Reading(NamedTuple):
    """Parsed answer: text or a time of day, a ratio, or the result of math-verify's parser.

    The unit is one of measurement, such as `km/h` or `cm2`; other words, such as `box red`; the
    base of a numeral, such as `_2`; or empty.
    """

    value: str | tuple[Fraction, ...] | list[Any]
    unit: str = ""


_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_CLOCK = re.compile(
    r"(\d{1,2}:[0-5]\d(?::[0-5]\d)?)(?:\s*([ap])\.?m\.?)?|(\d{1,2})\s*([ap])\.?m\.?", re.IGNORECASE
)
_DATE = re.compile(r"(\d{1,4}-\d{1,2}-\d{1,4}|\d{1,4}/\d{1,2}/\d{1,4}|\d{1,2}\.\d{1,2}\.\d{4})")
_RATIO = re.compile(r"\d{1,30}(?:\.\d{1,30})?(?:\s?:\s?\d{1,30}(?:\.\d{1,30})?)+")
_UNIT = (
    r"(?!\s*(?:and|or)\b)(?P<unit>(?:square|cubic|sq\.?|cu\.?)?\s*"
    r"(?:[A-Za-zµ]{2,}|[ACJKLNVW]|(?<=\s)[mgshl]|[a-z](?=\s?/\s?[a-z]))"
    r"(?:\s?/\s?[A-Za-z]+|\s+(?:per|of)\s+[a-z]+)?"
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
        *("N", "J", "W", "V", "A", "K", "C", "Hz", "Pa", "degree degrees", "radian radians rad"),
        *("kJ", "kW", "MW", "nm nanometer nanometers", "ton tons tonne tonnes", "acre acres"),
        *("gallon gallons gal", "quart quarts", "pint pints", "cup cups"),
        *("mi/h mph", "km/h kph kmh"),
        *("decade decades", "century centuries", "euro euros", "sterling", "yen", "rupee rupees"),
    )
    for name in names.split()
}
"""Units by their names. Answers with two different units are never equal."""
_IN_PROSE = re.compile(
    rf"(?<!\d)(?:{_CLOCK.pattern}|{_RATIO.pattern}|{_DATE.pattern}(?!\d)"
    r"|\d{1,30}(?:\.\d{1,30})?\\times 10\^\{[-+]?\d{1,9}\})"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textrm)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+){0,7}")
_WORDS_INSIDE = re.compile(
    r"\\(?:text|textrm|mathrm)\s*\{(?!\s*(?:and|or)\s*\})[^{}]*[A-Za-z]{2}[^{}]*\}\s*[\w(]"
)
"""Words in the middle of a formula: `5\\text{ hours }30\\text{ minutes}`."""
_TRAILING_TEXT = re.compile(
    r"(.*?[^\s\\,;])((?:\\[ ,;:!]|[\s,])*(?:\\(?:text|textrm|textbf|mathrm|mbox)\s*\{[^{}]*\}"
    r"(?:\s*\^\s*\{?[23]\}?)?(?:\\[ ,;:!]|[\s/])*)+)",
    re.DOTALL,
)
_BOUND = re.compile(r"\b(?:or (?:more|less|fewer|greater)|at (?:least|most))\b")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_PARTLY_READ = re.compile(
    r"\\[lcv]?dots|\.\.\.|\\not\b|\\(?:gcd|lcm|operatorname|equiv|pmod|bmod|mod)\b"
    r"|^\s*(?:[<>]|\\(?:le|ge|leq|geq|ne|neq|approx)\b)"
)
"""Notation that math-verify ignores in an expression."""
_BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(\d{1,2})\}?")
_REPEATING = re.compile(
    r"(?<!\d)(\d{0,30})\.(\d{0,30})(?:\\overline\s*\{(\d+)\}|\\(?:dot|bar)\s*\{?(\d)\}?)"
)
_LABELED = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(([A-J])\)\s*\}?(?:\\[ ,;:!]|\\quad|\s)*"
    r"([^\s,;/&].*)",
    re.DOTALL,
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])[A-Za-z]{4,}"
    r"|(?:^|\s)(?!(?:and|or|sin|cos|tan|log|ln|exp|max|min|mod|pi|inf)\b)[A-Za-z]{2,}(?=\s|[,;:!?'])"
)
_FORMULA = re.compile(r"\$[^$]*\$")
_WORD = re.compile(r"(?<!\\)\b(?!and\b|or\b)[A-Za-z]{2,}")
_PRODUCT = re.compile(r"[abckmnp-tv-z]{2}|abc|pqr|xyz")
"""Letters that mean a product of variables."""
_NAMES = {"pi", "infinity", "inf", "infty", "emptyset"}
_AND = re.compile(r"\s*,?\s*(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?\s*")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\s*\}?")
_SURROUNDING = " \t\n\"';:*_"
_SPACING = re.compile(r"\s+|\\[ ,;:!]|\\(?:left|right|quad)(?![A-Za-z])")
_MOST_CHARACTERS = 60
_MOST_WORDS = 3
_LONGEST_FORMULA = 500


def equal(answer: str, completion: str) -> bool:
    """Whether the completion's final answer equals the reference."""
    gold, final = final_answer(normalized(answer)), final_answer(answering_text(completion))
    option, other = (_LABELED.fullmatch(_plain(each)) for each in (gold, final))
    if option and other:
        return option[1] == other[1]
    if option:
        return equal(option[1] if re.fullmatch("[A-J]", _plain(final)) else option[2], completion)
    if other:
        return equal(answer, other[1] if re.fullmatch("[A-J]", _plain(gold)) else other[2])
    reference = read_reference(answer)
    if isinstance(reference.value, str) and reference.value == _phrase(final):
        return True
    reading = read_completion(completion)
    return reading is not None and _same(reference, reading)


def have_equal_answers(completion: str, other: str) -> bool:
    """Whether the final answers of two completions are equal."""
    one, two = read_completion(completion), read_completion(other)
    return one is not None and two is not None and _same(one, two)


def equals_itself(answer: str) -> bool:
    """Whether any completion can be equal to the reference."""
    reference = read_reference(answer)
    return _same(reference, reference)


def read_reference(answer: str) -> Reading:
    """Reads a reference answer: bare, between dollars, or marked as in a completion."""
    text = final_answer(normalized(answer))
    reading = _read(text)
    if reading is not None:
        return reading
    phrase = _phrase(text)
    if phrase is None:
        raise ValueError("no mathematics, or a sentence")
    return Reading(phrase)


def read_completion(completion: str) -> Reading | None:
    """Reads the final answer of a completion; None if there is none."""
    text = answering_text(completion)
    answer = final_answer(text)
    if is_ruled_out(answer):
        return None
    reading = _read(answer) if is_marked(text) or "\n" not in answer else None
    return reading or _searched(answer)


def _searched(text: str) -> Reading | None:
    """Finds an answer in prose; a final time, ratio or power of ten is read as such."""
    matches = list(_IN_PROSE.finditer(text))
    if matches and not re.search(r"\d", text[matches[-1].end() :]):
        return _read(matches[-1][0])
    parsed = _parsed(text)
    return None if parsed is None else Reading(parsed)


def _read(answer: str) -> Reading | None:
    plain = _plain(answer)
    words = _TEXT_COMMAND.sub(r"\1", plain)
    if (numbers := _numbers(plain, words)) is not None:
        return numbers
    unit = ""
    spaced = words.replace("\\ ", " ").replace("\\,", " ")
    if angle := _ANGLE.fullmatch(plain):
        plain, unit = angle[1], "degree"
    elif re.fullmatch(r"\d{1,3}(?: \d{3})+", plain):
        plain = plain.replace(" ", "")
    elif with_unit := _with_unit(spaced) or _WITH_LETTER.fullmatch(plain):
        plain, unit = with_unit[1], _measure(with_unit["unit"])
    elif _is_text(plain):
        return Reading(" ".join(plain.casefold().split()))
    elif _WORDS_INSIDE.search(plain):
        phrase = _phrase(plain)
        return None if phrase is None else Reading(phrase)
    elif trailing := _TRAILING_TEXT.fullmatch(plain[:_LONGEST_FORMULA]):
        if _BOUND.search(trailing[2]) or _VARIABLE.search(_TEXT_COMMAND.sub("", trailing[1])):
            text = _as_written(plain)
            return None if text is None else Reading(text)
        plain, unit = trailing[1], _measure(_TEXT_COMMAND.sub(r"\1", trailing[2]).strip())
    if not plain or _is_prose(plain):
        return None
    value = _expression(_latex(plain)) or _as_written(plain)
    return None if value is None else Reading(value, unit)


def _numbers(plain: str, words: str) -> Reading | None:
    if _DATE.fullmatch(words):
        return Reading(words)
    if clock := _CLOCK.fullmatch(words):
        time, half, hour, half_of_hour = clock.groups()
        half_of_day = half or half_of_hour or ""
        return Reading(f"{time or f'{hour}:00'} {half_of_day}".strip().lower())
    if _RATIO.fullmatch(plain):
        return Reading(tuple(Fraction(part) for part in plain.split(":")))
    if base := _BASE.fullmatch(plain):
        return Reading(base[1].upper().lstrip("0"), f"_{base[2]}")
    return None


def _with_unit(spaced: str) -> re.Match[str] | None:
    """Matches a number with a unit; `2ab` has none."""
    match = _WITH_UNIT.fullmatch(spaced)
    is_attached = match is not None and not spaced[match.end(1) : match.start("unit")]
    is_known = match is not None and match["unit"] in {*_MEASURES, "st", "nd", "rd", "th"}
    if match and is_attached and len(match["unit"]) < 4 and not is_known:
        return None
    return match


def _measure(unit: str) -> str:
    """Returns the canonical name of a unit with its power, or the words of an unknown unit."""
    power = "2" if unit.startswith("sq") else "3" if unit.startswith("cu") else ""
    power += "".join(re.findall(r"\d", unit))
    names = re.findall(r"[A-Za-zµ]+", re.sub(r"^(?:square|cubic|sq|cu)\b|\bper\b", " ", unit))
    measures = [_MEASURES.get(name, _MEASURES.get(name.lower(), "")) for name in names]
    if all(measures):
        return "/".join(measures) + power
    return " ".join(name.lower().rstrip("s") for name in names)


def _is_prose(plain: str) -> bool:
    outside_formulas = _FORMULA.sub(" ", plain) if "$" in plain else ""
    return bool(_PROSE.search(_TEXT_COMMAND.sub("", plain)) or _WORD.search(outside_formulas))


def _plain(answer: str) -> str:
    r"""Strips what surrounds an answer: dollars, `\text`, quotes, brackets, a full stop."""
    plain = answer.strip()
    while True:
        before = plain
        plain = plain.strip(_SURROUNDING).rstrip(".").lstrip("=# ")
        if plain.count("}") > plain.count("{"):
            plain = plain.removeprefix("}").removesuffix("}")
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if plain.startswith(opening) and plain.endswith(closing) and len(plain) > 3:
                plain = plain[len(opening) : -len(closing)]
        if text := _TEXT_COMMAND.fullmatch(plain):
            plain = text[1]
        if re.fullmatch(r"\((?:[A-Za-z]|[-\d.]+)\)", plain):
            plain = plain[1:-1]
        if plain.count("$") == 1 and plain.startswith("$"):
            is_money = re.fullmatch(rf"\$\s?{_NUMBER}", plain)
            plain = f"{plain[1:]} dollars" if is_money else plain[1:]
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
    plain = _REPEATING.sub(_repeating, plain)
    plain = plain.replace("$", "")
    return _AND.sub(", ", plain)


def _repeating(decimal: re.Match[str]) -> str:
    r"""Returns a decimal such as `0.1\overline{6}` as a fraction."""
    full, fixed, period = decimal[1] or "0", decimal[2], decimal[3] or decimal[4]
    numerator = int(full + fixed + period) - int(full + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _phrase(answer: str) -> str | None:
    """Returns an answer of a few words and numbers, such as `July 4`; None for other answers."""
    plain = " ".join(_TEXT_COMMAND.sub(r"\1", _plain(answer)).casefold().split())
    is_short = len(plain) <= _MOST_CHARACTERS and len(_WORD.findall(plain)) <= _MOST_WORDS
    return plain if is_short and "\n" not in answer and re.search(r"\w", plain) else None


def _as_written(plain: str) -> str | None:
    """Returns an expression that math-verify cannot read, which equals only itself."""
    squeezed = _SPACING.sub("", _TEXT_COMMAND.sub(r"\1", plain))
    squeezed = (
        re.sub(r"\{(\w)\}", r"\1", squeezed).replace(r"\leq", r"\le").replace(r"\geq", r"\ge")
    )
    has_name = any(character.isalnum() for character in squeezed)
    return squeezed if has_name and len(squeezed) <= _MOST_CHARACTERS else None


def _expression(latex: str) -> list[Any] | None:
    """Parses an expression; None if math-verify would ignore a part of it."""
    from math_verify import LatexExtractionConfig, parse

    if _PARTLY_READ.search(latex):
        return None
    plain = LatexExtractionConfig()
    normalization = replace(plain.normalization_config, units=False)
    config = [replace(plain, normalization_config=normalization)]
    parsed: list[Any] = parse(f"${latex}$", extraction_config=config, parsing_timeout=None)
    return None if all(isinstance(each, str) for each in parsed) else parsed


def _parsed(text: str) -> list[Any] | None:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    # math-verify returns text that it cannot turn into an expression as `str`.
    return None if all(isinstance(each, str) for each in parsed) else parsed


def _same(reference: Reading, answer: Reading) -> bool:
    return _are_units_alike(reference.unit, answer.unit) and _are_values_equal(reference, answer)


def _are_values_equal(reference: Reading, answer: Reading) -> bool:
    gold, value = reference.value, answer.value
    if isinstance(gold, tuple) and isinstance(value, tuple):
        return len(gold) == len(value) and all(
            a * value[0] == b * gold[0] for a, b in zip(gold, value, strict=True)
        )
    gold, value = _quotient(gold), _quotient(value)
    if isinstance(gold, str) and isinstance(value, list) and reference.unit.startswith("_"):
        return str(value[-1]) == gold
    if isinstance(gold, list) and isinstance(value, list):
        from math_verify import verify

        options = {"timeout_seconds": None, "raise_on_error": True}
        # An answer may be an inequality where the reference is an interval.
        return bool(verify(gold, value, allow_set_relation_comp=True, **options))
    if isinstance(gold, str) and isinstance(value, str) and ":" in gold:
        time, half_of_day = gold.partition(" ")[::2]
        return value in (gold, time) or (not half_of_day and value.split()[0] == time)
    if isinstance(gold, str) and isinstance(value, str):
        return [word.rstrip("s") for word in gold.split()] == [w.rstrip("s") for w in value.split()]
    return gold == value


def _are_units_alike(reference: str, other: str) -> bool:
    """Whether units are compatible: one may be missing, and words must share one."""
    if not reference or not other:
        return not other.startswith("_")
    names = {*_MEASURES.values()}
    are_measures = all({*re.split(r"[/\d]", unit)} - {""} <= names for unit in (reference, other))
    if are_measures or "_" in reference + other:
        return reference == other
    return bool({*reference.split()} & {*other.split()})


def _quotient(value: str | tuple[Fraction, ...] | list[Any]) -> str | list[Any] | tuple[Any, ...]:
    if isinstance(value, tuple) and len(value) == 2 and value[1]:
        from sympy import Rational

        return [Rational(*value)]
    return value


def compare_small_numbers_relatively() -> None:
    """Makes math-verify compare small numbers to four digits instead of only six decimals."""
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
