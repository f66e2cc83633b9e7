"""Curves and completions of a training stage, for its deck."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.infra.curves import completions_html, curve_svg
from nemo_rl_core.infra.metrics import MetricsFile

if TYPE_CHECKING:
    import pandas as pd

_ROWS_SHOWN = 40
_COLUMNS = ["prompt", "completion", "answer", "reward", "advantage", "truncated"]


def curves(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """Curves of `metrics.jsonl`, by name.

    Returns:
        One line with the first metric's course, and the curves as HTML.
    """
    lines = MetricsFile(folder / "metrics.jsonl").read()
    steps = [line.metrics["global_step"] for line in lines]
    charts = "".join(
        curve_svg(name, steps, [line.metrics[name] for line in lines])
        for name in names
        if name in lines[-1].metrics
    )
    first, last = lines[0].metrics[names[0]], lines[-1].metrics[names[0]]
    return f"{names[0]} {first:.3f} → {last:.3f}", charts


def records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A frame's rows, each by its columns' names."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def last_rollouts(folder: Path) -> str:
    """A table of completions of the last step, best and worst rewards first."""
    import pandas as pd

    newest = sorted((folder / "rollouts").glob("step_*.parquet"))[-1]
    frame = pd.read_parquet(newest, columns=_COLUMNS).sort_values("reward", kind="stable")
    half = _ROWS_SHOWN // 2
    shown = pd.concat([frame.head(half), frame.tail(half)]).drop_duplicates()
    return completions_html(records(shown))
