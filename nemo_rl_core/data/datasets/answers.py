"""Answers within longer texts."""

import re
from collections.abc import Callable

from nemo_rl_core.functional.boxes import last_boxes

_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

FindAnswer = Callable[[str], str | None]
"""The answer of a text, or None where it has none."""


def answer_finder(pattern: str) -> FindAnswer:
    """Returns the function for `RowFormat.answer_pattern`: `hashes`, `boxed` or an expression."""
    named: dict[str, FindAnswer] = {"hashes": after_hashes, "boxed": last_boxes}
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
