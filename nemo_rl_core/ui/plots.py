"""Small drawings of runs against each other: sparklines, scatter, parallel coordinates."""

from collections.abc import Sequence

from nemo_rl_core.ui.charts import fraction

SPARK_WIDTH, SPARK_HEIGHT = 84, 22


def sparkline_points(values: Sequence[float]) -> str:
    """Returns the points of an SVG polyline; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    step = (SPARK_WIDTH - 4) / (len(values) - 1)
    bottom, height = SPARK_HEIGHT - 3, SPARK_HEIGHT - 6
    places = [
        (2 + n * step, bottom - height * fraction(v, low, high)) for n, v in enumerate(values)
    ]
    bottom, height = SPARK_HEIGHT - 3, SPARK_HEIGHT - 6
    places = [
        (2 + n * step, bottom - height * fraction(v, low, high)) for n, v in enumerate(values)
    ]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
