"""Values as text that is safe to show and easy to read: completions, times, sizes."""

import json
import math
import re
import unicodedata
from datetime import UTC, datetime
from typing import Any

# All but printable ASCII, line feed and tab is looked at; most of it is harmless.
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")
_PLAIN_CATEGORIES = "LMNPSZ"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400

NONE = "\u2013"
"""Shown where there is nothing to show: a dash."""


def visible(text: str) -> str:
    r"""The text with control, format, surrogate and private characters spelled out.

    A terminal's colours, a reversed writing direction or half a surrogate pair would garble the
    page or fail to encode; markup is left to the template's escaping.

    Example:
        >>> visible("\x1b[31mred\u202e\ud800é")
        '\\x1b[31mred\\u202e\\ud800é'
    """
    return _SUSPECT.sub(_spelled_out, text)


def _spelled_out(match: re.Match[str]) -> str:
    character = match[0]
    if unicodedata.category(character)[0] in _PLAIN_CATEGORIES:
        # Line and paragraph separators (Zl, Zp) break a line where nobody wrote one.
        return character if character not in "\u2028\u2029" else f"\\u{ord(character):04x}"
    return character.encode("unicode_escape").decode()


def cut(value: object, length: int = 400) -> str:
    """At most `length` characters, and how many more there were.

    Example:
        >>> cut("abcdef", 4)
        'abcd… (2 more characters)'
    """
    text = str(value)
    if len(text) <= length:
        return text
    return f"{text[:length]}… ({len(text) - length:,} more characters)"


def duration(seconds: float | None) -> str:  # noqa: PLR0911  (one line a unit)
    """Such as `40 ms`, `0.4 s`, `2 min 5 s`, `3 h 20 min`; a dash for what is no time."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.1:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def moment(seconds: float | None) -> str:
    """A time of the database in UTC, to the second; a dash for None."""
    if seconds is None:
        return NONE
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def iso(seconds: float) -> str:
    """A time of the database as the attribute `datetime` wants it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def size(num_bytes: float) -> str:
    """Such as `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def number(value: object) -> str:
    """A figure with four significant digits; a dash where there is none."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def readable(value: Any) -> str:
    """A JSON value over several lines; a text as it is."""
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=2, ensure_ascii=False)


def short_stage(name: str) -> str:
    """`tasks.grpo_iteration.grpo_iteration` is `grpo_iteration`."""
    return cut(name.rpartition(".")[2], 120)
