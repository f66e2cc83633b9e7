"""Stage: whether a candidate takes the incumbent's place."""

import json
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.config.evaluation import PromotionConfig
from nemo_rl_core.evals.comparison import Comparison, compare
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from tasks.artifacts import Checkpoint, EvalReport, Evaluation, Promotion, PromotionDecision
from tasks.platform.resources import PLAIN
from tasks.platform.stage import cached_task, make
from tasks.recipes.common import PromotionTaskConfig

NUMERICS_VERSION = 1


@cached_task(PLAIN)
def promote(
    config: PromotionTaskConfig,
    incumbent: Checkpoint,
    candidate: Checkpoint,
    before: Evaluation,
    after: Evaluation,
) -> Promotion:
    """Promotes the candidate if it is better on the same prompts at the stated confidence."""

    def work(folder: Path) -> StageResult:
        compared = compare_reports(before, after, confidence=config.confidence)
        decision = {"promoted": promotes(compared, config.promotion), **asdict(compared)}
        write_atomic(folder / "decision.json", json.dumps(decision, indent=1))
        return StageResult("promotion", "json", explain(compared, config.promotion))

    parents = {"incumbent": incumbent, "candidate": candidate, "before": before, "after": after}
    fields = make(__name__, "promote", config=config, parents=parents, work=work)
    figures = json.loads((Path(fields["directory"].path) / "decision.json").read_text())
    return PromotionDecision(
        **fields, **{name: figures[name] for name in ("promoted", "difference", "low", "high")}
    )


def compare_reports(before: EvalReport, after: EvalReport, *, confidence: float) -> Comparison:
    """The greedy answers of two evaluations, prompt by prompt.

    Raises:
        DataError: If they asked different prompts.
    """
    from nemo_rl_core.evals.rows import greedy_outcomes, load_eval_rows

    outcomes = [
        greedy_outcomes(load_eval_rows(each.folder / "rows.parquet")) for each in (before, after)
    ]
    return compare(*outcomes, confidence=confidence)


def promotes(compared: Comparison, config: PromotionConfig) -> bool:
    """Whether the whole interval of the difference is above the margin.

    With a margin of 0 this is McNemar's exact test at the interval's confidence.
    """
    return compared.low > config.min_improvement


def explain(compared: Comparison, config: PromotionConfig) -> str:
    """Why a candidate is promoted, or is not, as text."""
    margin = config.min_improvement
    if promotes(compared, config):
        return f"promoted: {compared.measured}"
    bound = f"{100 * margin:+.1f}"
    if compared.difference <= margin:
        why = f"it did not improve by more than {bound} on {compared.num_prompts} prompts"
    else:
        why = (
            f"lower bound must exceed {bound}, so this may be chance; with {compared.num_prompts} "
            f"prompts, {compared.sensitivity}"
        )
    return f"NOT promoted: {compared.measured}, {why}"
