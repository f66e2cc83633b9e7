"""Measured values with their confidence intervals, as text."""

import re
from collections.abc import Mapping

_SAMPLED = re.compile(r"(pass|cons)_at_([0-9]+)")


def with_interval(figures: Mapping[str, float], name: str) -> str:
    """Formats a value and its interval, from `<name>_low` and `<name>_high`.

    Example:
        >>> with_interval({"a": 0.5, "a_low": 0.25, "a_high": 0.75}, "a")
        '0.500 [0.250, 0.750]'
    """
    return f"{figures[name]:.3f} [{figures[f'{name}_low']:.3f}, {figures[f'{name}_high']:.3f}]"


def sampled_figures(figures: Mapping[str, float]) -> dict[str, str]:
    """Formats the `pass_at_<k>` and `cons_at_<k>` in `figures`, in their order.

    Values without intervals, from older evaluations, are left out.

    Example:
        >>> sampled_figures({"pass_at_4": 0.5, "pass_at_4_low": 0.25, "pass_at_4_high": 0.75})
        {'pass@4': '0.500 [0.250, 0.750]'}
    """
    return {
        f"{match[1]}@{match[2]}": with_interval(figures, name)
        for name in figures
        if (match := _SAMPLED.fullmatch(name)) and f"{name}_low" in figures
    }
