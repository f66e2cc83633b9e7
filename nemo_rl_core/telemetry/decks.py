"""Curves, completions and measured values with intervals, for decks and closing lines."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.telemetry.curves import completions_html, curve_svg
from nemo_rl_core.telemetry.metrics import MetricsFile

if TYPE_CHECKING:
    import pandas as pd

_ROWS_SHOWN = 40
_MAX_STEPS_OF_A_MEAN = 10
_FAILURES = {
    "num_failed_rollouts": "rollouts failed",
    "num_engine_restarts": "engine restarts",
    "num_environment_restarts": "environment actors replaced",
    "num_reward_retries": "rewards retried",
}
_USUAL = (
    "reward",
    "loss",
    "accuracy",
    "validation_reward",
    "validation_loss",
    "completion_length",
    "kl",
    "grad_norm",
)
_COLUMNS = ["prompt", "completion", "answer", "reward", "advantage", "truncated"]


def curves(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """Returns a line with the change of the first metric and failures, and charts as HTML."""
    lines = MetricsFile(folder / "metrics.jsonl").read()
    steps = [line.metrics["global_step"] for line in lines]
    charts = "".join(
        # A metric may be missing from some steps, such as the policy's during critic warm-up.
        curve_svg(name, steps, [line.metrics.get(name, math.nan) for line in lines])
        for name in names
        if any(name in line.metrics for line in lines)
    )
    summary = change_of(
        names[0], [line.metrics[names[0]] for line in lines if names[0] in line.metrics]
    )
    for name, words in _FAILURES.items():
        total = sum(line.metrics.get(name, 0.0) for line in lines)
        summary += [f"{words} {total:.0f}"] if total else []
    return ", ".join(summary), charts


def change_of(name: str, values: Sequence[float]) -> list[str]:
    """Returns a text with the means of the first and last tenth of the steps, at most 10 each.

    Example:
        >>> change_of("loss", [4.0, 2.0, 1.0])
        ['loss 4.000 → 1.000']
        >>> change_of("reward", [0.1, 0.3, *[0.5] * 16, 0.6, 0.8])
        ['reward 0.200 → 0.700 (means of 2 steps)']
    """
    if not values:
        return []
    number = min(max(len(values) // 10, 1), _MAX_STEPS_OF_A_MEAN)
    first, last = sum(values[:number]) / number, sum(values[-number:]) / number
    note = f" (means of {number} steps)" if number > 1 else ""
    return [f"{name} {first:.3f} → {last:.3f}{note}"]


def decision_html(summary: str, decision: Mapping[str, Any]) -> str:
    """Returns what a promotion decided, and the figures that it decided on, as a table."""
    share = "{:.1%}".format
    rows = {
        "decision": summary,
        "right before": share(decision["before"]),
        "right after": share(decision["after"]),
        "prompts gained": decision["gained"],
        "prompts lost": decision["lost"],
        "McNemar's p": decision["p_value"],
        "prompts": decision["num_prompts"],
    }
    return completions_html([{"figure": name, "value": value} for name, value in rows.items()])


def figures_html(metrics: Mapping[str, float]) -> str:
    """Returns the figures of an evaluation with their intervals as a table, one per row."""
    bounds = {f"{name}_{end}" for name in metrics for end in ("low", "high")}
    rows = []
    for name, value in metrics.items():
        if name not in bounds:
            interval = [metrics.get(f"{name}_{end}") for end in ("low", "high")]
            shown = "" if None in interval else f"{interval[0]:.3f} to {interval[1]:.3f}"
            rows.append({"figure": name.replace("_", " "), "value": value, "interval": shown})
    return completions_html(rows)


def training_deck(folder: Path) -> tuple[str, str]:
    """Returns the result of `curves` for the usual metrics of a training, with completions."""
    lines = MetricsFile(folder / "metrics.jsonl").read()
    recorded = {name for line in lines for name in line.metrics} - {"global_step"}
    names = [name for name in _USUAL if name in recorded] or sorted(recorded)[:2]
    summary, deck = curves(folder, names) if names else ("", "")
    has_rollouts = any((folder / "rollouts").glob("step_*.parquet"))
    return summary, deck + (last_rollouts(folder) if has_rollouts else "")


def records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """Returns the rows of a frame as dictionaries."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def last_rollouts(folder: Path) -> str:
    """Returns a table of completions of the last step with the lowest and highest rewards."""
    import pandas as pd

    newest = sorted((folder / "rollouts").glob("step_*.parquet"))[-1]
    frame = pd.read_parquet(newest, columns=[*_COLUMNS, "error"])
    if frame["error"].isna().all():
        frame = frame[_COLUMNS]
    # Failed rollouts come first, for visibility.
    frame = frame.sort_values("reward", kind="stable", na_position="first")
    half = _ROWS_SHOWN // 2
    shown = pd.concat([frame.head(half), frame.tail(half)]).drop_duplicates()
    return completions_html(records(shown))


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
