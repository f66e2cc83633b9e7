"""Measured figures with the ends of their intervals, as text."""

import re
from collections.abc import Mapping

_SAMPLED = re.compile(r"(pass|cons)_at_([0-9]+)")


def with_interval(figures: Mapping[str, float], name: str) -> str:
    """A figure and, in brackets, the interval that `<name>_low` and `<name>_high` hold.

    Example:
        >>> with_interval({"a": 0.5, "a_low": 0.25, "a_high": 0.75}, "a")
        '0.500 [0.250, 0.750]'
    """
    return f"{figures[name]:.3f} [{figures[f'{name}_low']:.3f}, {figures[f'{name}_high']:.3f}]"


def sampled_figures(figures: Mapping[str, float]) -> dict[str, str]:
    """Those of `pass_at_<k>` and `cons_at_<k>` that there are, in the order of `figures`.

    Evaluations that were made without intervals have none to show, and are left out.

    Example:
        >>> sampled_figures({"pass_at_4": 0.5, "pass_at_4_low": 0.25, "pass_at_4_high": 0.75})
        {'pass@4': '0.500 [0.250, 0.750]'}
    """
    return {
        f"{found[1]}@{found[2]}": with_interval(figures, name)
        for name in figures
        if (found := _SAMPLED.fullmatch(name)) and f"{name}_low" in figures
    }
