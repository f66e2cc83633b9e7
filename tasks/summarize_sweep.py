"""Stage: the points of a sweep next to each other, and whether one setting is the best."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.evals.sweep import SweepResult, summarize
from nemo_rl_core.history.records import point_label
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html, curves_svg
from tasks.artifacts import Report, Summary, SweepReport
from tasks.recipes.sweep import SEED, SummaryTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 2
_METRIC = "greedy_accuracy"


@cached_task()
def summarize_sweep(config: SummaryTaskConfig, reports: list[Report | None]) -> Summary:
    """Groups the points by setting, and tests the settings against each other.

    A point that failed is None, if the recipe allows it.
    """
    points = list(zip(config.points, reports, strict=True))
    succeeded = [report for report in reports if report is not None]

    def work(folder: Path) -> StageResult:
        sweep = summarize(
            [(values, report.metrics[_METRIC] if report else None) for values, report in points],
            apart=SEED,
            confidence=config.confidence,
        )
        write_atomic(folder / "sweep.json", json.dumps(asdict(sweep), indent=1))
        summary = f"{len(succeeded)} of {len(reports)} points; {sweep.verdict}"
        return StageResult("sweep", "json", summary, deck=_deck(sweep, reports))

    parents = {f"point {number}": report for number, report in enumerate(succeeded)}
    fields = make(__name__, "summarize_sweep", config=config, parents=parents, work=work)
    return SweepReport(**fields)


def _deck(sweep: SweepResult, reports: Sequence[Report | None]) -> str:
    points = [
        {
            **each["point"],
            "accuracy": "failed" if report is None else each["accuracy"],
            "wall seconds": "" if report is None else report.manifest.figures["wall_seconds"],
            "tokens": "" if report is None else report.manifest.cost.tokens,
        }
        for each, report in zip(sweep.points, reports, strict=True)
    ]
    settings = [
        {
            **each.fields,
            "points": len(each.accuracies),
            "failed": each.num_failed,
            "mean accuracy": "" if each.mean is None else each.mean,
            "low": "" if each.low is None else each.low,
            "high": "" if each.high is None else each.high,
        }
        for each in sweep.settings
    ]
    lines = {
        point_label(each["point"]): list(zip(report.steps, report.rewards, strict=True))
        for each, report in zip(sweep.points, reports, strict=True)
        if report is not None
    }
    return (
        f"<p>{html.escape(sweep.verdict)}</p>"
        f"<h3>Settings</h3>{completions_html(settings)}"
        f"<h3>Points</h3>{completions_html(points)}" + curves_svg("reward", lines)
    )
