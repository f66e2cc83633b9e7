"""Formats values as text that is safe to show: completions, times, sizes."""

import json
import math
import re
import unicodedata
from datetime import UTC, datetime
from typing import Any

from nemo_rl_core.ui.turns import messages_of, plain

# Everything except printable ASCII, line feed and tab is checked; most of it is harmless.
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")
_ANNOTATED = re.compile(r"Annotated\[([\w.]+), <[^>]*>\]")
_HARMLESS_CATEGORIES = "LMNPSZ"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400

NONE = "\u2013"
"""A dash, shown for a missing value."""


def visible(text: str) -> str:
    r"""Escapes control, format, surrogate and private characters.

    A terminal's colors, a reversed writing direction or half a surrogate pair would garble the
    page or fail to encode. Markup is escaped by the template.

    Example:
        >>> visible("\x1b[31mred\u202e\ud800é")
        '\\x1b[31mred\\u202e\\ud800é'
    """
    return _SUSPECT.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if unicodedata.category(character)[0] in _HARMLESS_CATEGORIES:
        # Line and paragraph separators (Zl, Zp) would break a line.
        return character if character not in "\u2028\u2029" else f"\\u{ord(character):04x}"
    return character.encode("unicode_escape").decode()


def plain_type(name: str) -> str:
    """Removes annotations from a type's name, which older records contain.

    Example:
        >>> plain_type("Optional[Annotated[tasks.artifacts.Model, <HashMethod object at 0x7f>]]")
        'Optional[tasks.artifacts.Model]'
    """
    return _ANNOTATED.sub(r"\1", name)


def cut(value: object, length: int = 400) -> str:
    """Cuts a text to `length` characters and appends the number of omitted ones.

    Example:
        >>> cut("abcdef", 4)
        'abcd… (2 more characters)'
    """
    text = str(value)
    if len(text) <= length:
        return text
    return f"{text[:length]}… ({len(text) - length:,} more characters)"


def duration(seconds: float | None) -> str:  # noqa: PLR0911  (one line per unit)
    """Formats a duration, such as `40 ms`, `0.4 s`, `2 min 5 s`; a dash if not finite."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.1:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < _MINUTE:
        return f"{rounded} s"
    if rounded < _HOUR:
        return f"{rounded // _MINUTE} min {rounded % _MINUTE} s"
    if rounded < _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR} h"


def moment(seconds: float | None) -> str:
    """Formats a Unix time in UTC with seconds; a dash for None."""
    if seconds is None:
        return NONE
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def ago(seconds: float, now: float) -> str:
    """Formats how long ago a time was, in its largest unit.

    Example:
        >>> ago(100.0, 290.0)
        '3 min ago'
    """
    passed = max(0.0, now - seconds)
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if passed >= unit:
            return f"{passed // unit:.0f} {name} ago"
    return "just now"


def iso(seconds: float) -> str:
    """Formats a Unix time in UTC in ISO 8601, for the attribute `datetime`."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def size(num_bytes: float) -> str:
    """Formats a size, such as `512 B` or `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def number(value: object) -> str:
    """Formats a number with four significant digits; a dash for None."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def readable(value: Any) -> str:
    """Formats a conversation by turns and JSON with indentation; other texts are unchanged."""
    if isinstance(value, str):
        return plain(messages) if (messages := messages_of(value)) else value
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def short_stage(name: str) -> str:
    """Returns `grpo_iteration` for `tasks.grpo_iteration.grpo_iteration`."""
    return cut(name.rpartition(".")[2], 120)
