"""Stage: two evaluations compared, prompt by prompt."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.evals.rows import Row, changed_rows, load_eval_rows
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html
from tasks.artifacts import CompareReport, Comparison, Evaluation
from tasks.pods.resources import PLAIN
from tasks.promote import compare_reports
from tasks.recipes.evaluate import ComparisonTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_CHANGES_SHOWN = 40


@cached_task(PLAIN)
def compare(config: ComparisonTaskConfig, before: Evaluation, after: Evaluation) -> Comparison:
    """Computes the paired difference, McNemar's test, and the smallest detectable difference."""

    def work(folder: Path) -> StageResult:
        compared = compare_reports(before, after, confidence=config.confidence)
        write_atomic(folder / "comparison.json", json.dumps(asdict(compared), indent=1))
        pairs = changed_rows(
            *(load_eval_rows(each.folder / "rows.parquet") for each in (before, after))
        )
        summary = f"{after.measured} against {before.measured}: {compared.verdict}"
        deck = completions_html([asdict(compared)]) + completions_html(_changes(pairs))
        return StageResult("comparison", "json", summary, deck=deck)

    parents = {"before": before, "after": after}
    fields = make(__name__, "compare", config=config, parents=parents, work=work)
    figures = json.loads((Path(fields["directory"].path) / "comparison.json").read_text())
    return CompareReport(**fields, metrics={name: float(each) for name, each in figures.items()})


def _changes(pairs: Sequence[tuple[Row, Row]]) -> list[dict[str, object]]:
    return [
        {
            "prompt": old["prompt"],
            "answer": old["answer"],
            "before": old["completion"],
            "after": new["completion"],
            "change": "gained" if new["correct"] else "lost",
        }
        for old, new in pairs[:_CHANGES_SHOWN]
    ]
