"""Stage: decides whether a candidate replaces the incumbent."""

import json
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.config.evaluation import PromotionConfig
from nemo_rl_core.evals.comparison import Comparison
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.decks import decision_html
from tasks.artifacts import Checkpoint, EvalReport, Evaluation, Promotion, PromotionDecision
from tasks.pods.resources import PLAIN
from tasks.recipes.common import PromotionTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(PLAIN)
def promote(
    config: PromotionTaskConfig,
    incumbent: Checkpoint,
    candidate: Checkpoint,
    after: Evaluation,
    before: Evaluation | None = None,
) -> Promotion:
    """Promotes the candidate if it is better on the same prompts at the stated confidence.

    An alias in the recipe then refers to the candidate. Without an evaluation of the incumbent,
    `after` compares both models on held-out pairs.
    """

    def work(folder: Path) -> StageResult:
        if before is None:
            compared = compare_pair_report(after, confidence=config.confidence)
        else:
            compared = compare_reports(before, after, confidence=config.confidence)
        promoted = promotes(compared, config.promotion)
        decision = {"promoted": promoted, **asdict(compared)}
        if promoted and config.promotion.name is not None:
            model = str(candidate.directory.remote_source or candidate.directory.path)
            Aliases(Store.default()).move(config.promotion.name, model)
        write_atomic(folder / "decision.json", json.dumps(decision, indent=1))
        measured_on = "pairs" if before is None else "prompts"
        summary = explain(compared, config.promotion, measured_on=measured_on)
        return StageResult("promotion", "json", summary, deck=decision_html(summary, decision))

    parents = {"incumbent": incumbent, "candidate": candidate, "after": after}
    parents |= {"before": before} if before is not None else {}
    fields = make(__name__, "promote", config=config, parents=parents, work=work)
    figures = json.loads((Path(fields["directory"].path) / "decision.json").read_text())
    return PromotionDecision(
        **fields, **{name: figures[name] for name in ("promoted", "difference", "low", "high")}
    )


def compare_reports(before: EvalReport, after: EvalReport, *, confidence: float) -> Comparison:
    """Compares the greedy answers of two evaluations, prompt by prompt."""
    from nemo_rl_core.evals.rows import compare_files

    files = (each.folder / "rows.parquet" for each in (before, after))
    return compare_files(*files, confidence=confidence)


def compare_pair_report(report: EvalReport, *, confidence: float) -> Comparison:
    """Returns the verdict on the held-out pairs of `evaluate_pairs`."""
    import pyarrow.parquet as pq

    from nemo_rl_core.evals.comparison import compare_pairs

    rows = pq.read_table(report.folder / "rows.parquet").to_pylist()
    return compare_pairs(rows, confidence=confidence)


def promotes(compared: Comparison, config: PromotionConfig) -> bool:
    """Whether the complete interval of the difference is above the margin.

    With a margin of 0 this is McNemar's exact test at the interval's confidence.
    """
    return compared.low > config.min_improvement


def explain(compared: Comparison, config: PromotionConfig, *, measured_on: str = "prompts") -> str:
    """Explains why a candidate is promoted, or is not."""
    margin = config.min_improvement
    measured = compared.measured
    if measured_on == "pairs":
        measured += f" of pair accuracy from {100 * compared.before:.0f} %"
    if promotes(compared, config):
        return f"promoted: {measured}"
    bound = f"{100 * margin:+.1f}"
    if compared.difference <= margin:
        why = f"it did not improve by more than {bound} on {compared.num_prompts} {measured_on}"
    else:
        why = (
            f"lower bound must exceed {bound}, so this may be chance; with {compared.num_prompts} "
            f"{measured_on}, {compared.sensitivity}"
        )
    return f"NOT promoted: {measured}, {why}"
