"""Stage: the points of a sweep side by side, with intervals over seeds."""

import json
from pathlib import Path

from nemo_rl_core.evals.sweep import describe_point, group_by_settings
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html, curves_svg
from tasks.artifacts import Report, Summary, SweepReport
from tasks.platform.stage import cached_task, make
from tasks.recipes.sweep import SEED, SummaryTaskConfig

NUMERICS_VERSION = 1
_METRIC = "greedy_accuracy"


@cached_task()
def summarize_sweep(config: SummaryTaskConfig, reports: list[Report | None]) -> Summary:
    """A line for each setting, its mean over seeds with an interval, and all curves in one chart.

    A point that failed is None, where the recipe lets points fail.
    """
    ended = [
        (values, report)
        for values, report in zip(config.points, reports, strict=True)
        if report is not None
    ]

    failed = [
        values for values, report in zip(config.points, reports, strict=True) if report is None
    ]

    def work(folder: Path) -> StageResult:
        figures = [(values, report.metrics[_METRIC]) for values, report in ended]
        rows = group_by_settings(figures, apart=SEED, confidence=config.confidence)
        write_atomic(folder / "sweep.json", json.dumps(rows, indent=1))
        best = max(rows, key=lambda row: row["mean"])
        summary = f"{len(ended)} of {len(reports)} points, best {describe_point(best)}"
        lines = {
            ", ".join(f"{name} {value}" for name, value in values.items()): list(
                zip(report.steps, report.rewards, strict=True)
            )
            for values, report in ended
        }
        shown = [{name: _shown(value) for name, value in row.items()} for row in rows]
        deck = completions_html(shown) + curves_svg("reward", lines)
        if failed:
            deck += f"<p>{len(failed)} of {len(reports)} points failed:</p>" + completions_html(
                failed
            )
        return StageResult("sweep", "json", summary, deck=deck)

    parents = {f"point {place}": report for place, (_, report) in enumerate(ended)}
    fields = make(__name__, "summarize_sweep", config=config, parents=parents, work=work)
    return SweepReport(**fields)


def _shown(value: object) -> object:
    """A setting that was run once has no interval."""
    return "-" if value is None else value
