"""Stage: whether a candidate takes the incumbent's place."""

import json
from pathlib import Path
from typing import NamedTuple

from nemo_rl_core.evals.statistics import mcnemar_p_value, paired_bootstrap
from nemo_rl_core.infra.files import write_atomic
from nemo_rl_core.infra.produce import Made
from tasks.artifacts import Checkpoint, EvalReport, Evaluation, Promotion, PromotionDecision
from tasks.decks import records
from tasks.experiments.common import PromotionStage
from tasks.resources import LIGHT
from tasks.stage import cached_task, make

_NUM_RESAMPLES = 10_000


class Promoted(NamedTuple):
    """The decision, and the checkpoint that stands after it."""

    decision: Promotion
    checkpoint: Checkpoint


@cached_task(requests=LIGHT)
def promote(
    config: PromotionStage,
    incumbent: Checkpoint,
    candidate: Checkpoint,
    before: Evaluation,
    after: Evaluation,
) -> Promoted:
    """Promotes the candidate if it is better on the same prompts at the stated confidence."""

    def work(folder: Path) -> Made:
        old, new = _scores(before), _scores(after)
        order = sorted(old)
        pairs = [old[key] for key in order], [new[key] for key in order]
        compared = paired_bootstrap(
            *pairs,
            confidence=config.confidence,
            num_resamples=_NUM_RESAMPLES,
            seed=config.seed,
        )
        figures = {
            "promoted": compared.lower > config.promotion.min_improvement,
            "difference": compared.difference,
            "low": compared.lower,
            "high": compared.upper,
            "p_value": mcnemar_p_value(*([score > 0 for score in side] for side in pairs)),
        }
        write_atomic(folder / "decision.json", json.dumps(figures, indent=1))
        return Made("promotion", "json", _explain(figures, config))

    parents = {"incumbent": incumbent, "candidate": candidate, "before": before, "after": after}
    fields = make("promote", config=config, parents=parents, work=work)
    figures = json.loads((Path(fields["directory"].path) / "decision.json").read_text())
    figures.pop("p_value")
    decision = PromotionDecision(**fields, **figures)
    return Promoted(decision, candidate if decision.promoted else incumbent)


def _scores(report: EvalReport) -> dict[str, float]:
    import pandas as pd

    from nemo_rl_core.evals.evaluate import greedy_scores

    return greedy_scores(records(pd.read_parquet(report.folder / "rows.parquet")))


def _explain(figures: dict[str, float], config: PromotionStage) -> str:
    measured = (
        f"{100 * figures['difference']:+.1f} points "
        f"[{100 * figures['low']:+.1f}, {100 * figures['high']:+.1f}]"
    )
    if figures["promoted"]:
        return f"promoted: {measured}"
    bound = 100 * config.promotion.min_improvement
    return f"NOT promoted: {measured}, lower bound must exceed {bound:+.1f}"
