"""Costs as labels and values."""

import math
from collections.abc import Mapping, Sequence

from nemo_rl_core.ui.text import duration, number

CostLines = Sequence[tuple[str, str]]
"""Labels and values, such as `("tokens", "12,345")`."""


def total_cost(costs: Sequence[Mapping[str, float | str | None]]) -> CostLines:
    """Sums the costs of several nodes, with the largest peak; empty if none has a cost."""
    recorded = [
        {
            name: value
            for name, value in cost.items()
            if isinstance(value, int | float) and value and math.isfinite(value)
        }
        for cost in costs
        if cost
    ]
    if not recorded:
        return ()

    def total(name: str) -> float:
        return sum(float(cost.get(name, 0)) for cost in recorded)

    peak = max(float(cost.get("peak_memory_gib", 0)) for cost in recorded)
    lines = [("of work", duration(total("wall_seconds")))]
    if total("gpu_seconds"):
        lines.append(("of GPUs", duration(total("gpu_seconds"))))
    if total("tokens"):
        lines.append(("tokens", number(round(total("tokens")))))
    if peak:
        lines.append(("GiB at its peak", number(round(peak, 2))))
    if total("flops"):
        lines.append(("FLOPs", number(total("flops"))))
    return lines
