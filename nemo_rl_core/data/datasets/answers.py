"""Answers within longer texts."""

import re
from collections.abc import Callable

_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(\{)?")

FindAnswer = Callable[[str], str | None]
"""The answer of a text, or None where it has none."""


def answer_finder(pattern: str) -> FindAnswer:
    """Returns the function for `RowFormat.answer_pattern`: `hashes`, `boxed` or an expression."""
    named: dict[str, FindAnswer] = {"hashes": after_hashes, "boxed": last_boxed}
    if pattern in named:
        return named[pattern]
    expression = re.compile(pattern)

    def last_match(text: str) -> str | None:
        found = None
        for match in expression.finditer(text):
            found = match.group(1) if match.group(1) is not None else found
        return None if found is None else found.strip() or None

    return last_match


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`; a number loses the commas of its thousands.

    Example:
        >>> after_hashes("48/2 = 24, 48+24 = 72\\n#### 1,072")
        '1072'
        >>> after_hashes("72") is None
        True
    """
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    if not mark or not lines:
        return None
    answer = lines[0].strip()
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or `\fbox{…}`, with braces that it nests.

    `\boxed 5` holds the one word after it, as TeX reads it. An escaped brace opens nothing.

    Example:
        >>> last_boxed(r"\boxed{1} so \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> last_boxed(r"\boxed{\frac{1}{2}") is None
        True
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    box = boxes[-1]
    if box.group(1) is None:
        word = re.match(r"[^\s$]+", text[box.end() :])
        return word.group().rstrip(".,") or None if word else None
    depth = 1
    for part in re.finditer(r"\\.|[{}]", text[box.end() :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(part.group(), 0)
        if not depth:
            return text[box.end() : box.end() + part.start()].strip() or None
    return None
