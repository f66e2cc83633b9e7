"""The table of `nemo-rl runs`: its columns, as text."""

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.run_columns import (
    COLUMNS,
    RunRow,
    differing,
    shown_settings,
    value_of,
)
from nemo_rl_core.history.run_results import Accuracy, sparkline
from nemo_rl_core.telemetry.curves import sparkline as bars

STYLES = {
    "running": "bold blue",
    "succeeded": "green",
    "cached": "cyan",
    "failed": "bold red",
    "stopped": "yellow",
    "aborted": "yellow",
}
DEFAULT_COLUMNS = ("run", "recipe", "state", "accuracy", "reward", "took", "settings")
_WIDE = 120
"""Columns of a terminal that has room for all default columns."""
_SPARK_WIDTH = 8
_MAX_SETTINGS = 4
_RIGHT = ("took", "tokens", "gpu_hours", "money", "stages", "cached", "step", "gain", "loss")


def column_names(text: str) -> list[str]:
    """Returns the columns in a list with commas; `+` in front adds to the default ones."""
    names = [name.strip() for name in text.removeprefix("+").split(",") if name.strip()]
    return [*DEFAULT_COLUMNS, *names] if text.startswith("+") or not text else names


def runs_table(
    rows: Sequence[RunRow], names: Sequence[str], history: History, *, width: int
) -> Table:
    """Returns the table of rows with the columns of these names.

    In a narrow terminal the default columns are fewer: state and time are below the id, and
    intervals are left out.
    """
    is_narrow = width < _WIDE and [*names] == [*DEFAULT_COLUMNS]
    if is_narrow:
        names = [name for name in names if name not in ("state", "took")]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        is_plain = name in ("run", "state", "took", "accuracy", "reward")
        justify: JustifyMethod = "right" if name in _RIGHT else "left"
        table.add_column(Text(name), no_wrap=is_plain, justify=justify, overflow="fold")
    different = differing(rows)
    for row in rows:
        cells = {name: _cell(row, name, different[row.id], history) for name in names}
        if is_narrow:
            below = Text.assemble("\n", _cell(row, "state", (), history), f"  {_took(row)}")
            cells["run"].append_text(below)
            cells["accuracy"] = Text(re.sub(r" \[[^]]*\]", "", cells["accuracy"].plain))
        table.add_row(*cells.values())
    return table


def _cell(row: RunRow, name: str, different: Sequence[str], history: History) -> Text:
    if name == "state":
        return Text(row.state, style=STYLES[row.state])
    if name == "settings":
        settings = [
            f"{key}={_plain(value)}" for key, value in shown_settings(row, different).items()
        ]
        more = len(settings) - _MAX_SETTINGS
        shown = settings[:_MAX_SETTINGS] + ([f"{more} more"] if more > 0 else [])
        return Text(", ".join(shown))
    if name in ("reward", "loss"):
        return Text(_last_mean(row, name, history))
    if name in COLUMNS or name == "run":
        format_row = _FORMATS.get(name)
        return Text(format_row(row) if format_row else _plain(COLUMNS[name].value(row)))
    return Text(_plain(value_of(row, name)))


def _last_mean(row: RunRow, name: str, history: History) -> str:
    value = getattr(row.results, name)
    if value is None:
        return ""
    values = sparkline(history, row.results, row.ended_at) if row.results.metric == name else []
    return f"{value:.3f} {bars(values, _SPARK_WIDTH)}".rstrip()


def _accuracy(row: RunRow) -> str:
    before, after = row.results.before, row.results.after
    return " → ".join(_measured(each) for each in (before, after) if each is not None)


def _measured(measured: Accuracy) -> str:
    bounds = (measured.low, measured.high)
    interval = " [{:.3f}, {:.3f}]".format(*bounds) if None not in bounds else ""
    return f"{measured.value:.3f}{interval}"


def _took(row: RunRow) -> str:
    end = row.ended_at if row.ended_at is not None else datetime.now().timestamp()
    minutes, seconds = divmod(round(end - row.started_at), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _step(row: RunRow) -> str:
    step, total = row.results.step, row.results.num_steps
    return "" if step is None else f"{step}/{total}" if total else str(step)


def _money(row: RunRow) -> str:
    money = row.results.money
    return "" if money is None else f"{money:.2f} {row.results.currency}".rstrip()


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if type(value) is int else str(value)


_FORMATS: dict[str, Callable[[RunRow], str]] = {
    "run": lambda row: ("* " if row.pinned else "") + row.id,
    "accuracy": _accuracy,
    "took": _took,
    "step": _step,
    "money": _money,
    "started": lambda row: f"{datetime.fromtimestamp(row.started_at):%Y-%m-%d %H:%M}",
    "pin": lambda row: "pinned" if row.pinned else "",
}
