"""A cost as words and figures."""

import math
from collections.abc import Mapping, Sequence

from nemo_rl_core.ui.text import duration, number

Cost = Sequence[tuple[str, str]]
"""Words and figures, such as `("tokens", "12,345")`."""


def total_cost(costs: Sequence[Mapping[str, float]]) -> Cost:
    """What several nodes took together; nothing where none has a cost. Peaks are not added."""
    known = [
        {name: value for name, value in cost.items() if value and math.isfinite(value)}
        for cost in costs
        if cost
    ]
    if not known:
        return ()

    def total(name: str) -> float:
        return sum(float(cost.get(name, 0)) for cost in known)

    peak = max(float(cost.get("peak_memory_gib", 0)) for cost in known)
    figures = [("of work", duration(total("wall_seconds")))]
    if total("gpu_seconds"):
        figures.append(("of GPUs", duration(total("gpu_seconds"))))
    if total("tokens"):
        figures.append(("tokens", number(round(total("tokens")))))
    if peak:
        figures.append(("GiB at its peak", number(round(peak, 2))))
    if total("flops"):
        figures.append(("FLOPs", number(total("flops"))))
    return figures
