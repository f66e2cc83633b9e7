"""Parsing of ages and sizes, and formatting of sizes."""

import re
from collections.abc import Mapping
from typing import Any

import click

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


class _Quantity(click.ParamType[float]):
    """A number with a unit, in the smallest one."""

    units: Mapping[str, int]
    hint: str

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if not isinstance(value, str):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        if not match or match[2] not in self.units:
            self.fail(f"{value!r} is not {self.hint}", param)
        return float(match[1]) * self.units[match[2]]


class Age(_Quantity):
    """A span of time such as `30d`, in seconds."""

    name, units = "age", _SECONDS
    hint = "an age: write a number and s, m, h, d or w, as in 30d"


class Size(_Quantity):
    """A number of bytes such as `20GiB`; GB are 10**9 bytes, GiB and G are 2**30."""

    name, units = "size", _BYTES
    hint = "a size: write a number and a unit, as in 20GiB or 500MB"


def show_bytes(num_bytes: int) -> str:
    """Formats a size with three digits, such as `1.25 GiB`."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{num_bytes} B"
    size = num_bytes / 1024**power
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f} {'KMGT'[power - 1]}iB"
