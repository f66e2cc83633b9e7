"""Stage: fails if a model is worse than the one that it was compared with."""

from nemo_rl_core.errors import DataError
from tasks.artifacts import CompareReport, Comparison
from tasks.stage.stage import uncached_task


@uncached_task
def refuse_regression(comparisons: list[Comparison]) -> Comparison:
    """Passes a comparison on, unless the complete interval of the difference is below zero."""
    return refuse_worse(comparisons)


def refuse_worse(comparisons: list[CompareReport]) -> CompareReport:
    """Returns the comparison of a regression check."""
    (comparison,) = comparisons
    figures = comparison.metrics
    if figures["high"] < 0:
        raise DataError(
            "the model is worse than its baseline",
            expected=f"an interval of the difference that reaches 0 at "
            f"{100 * figures['confidence']:g} % confidence",
            got=f"{100 * figures['difference']:+.1f} points "
            f"[{100 * figures['low']:+.1f}, {100 * figures['high']:+.1f}]",
            fix="look at the lost prompts in the comparison's deck; keep the baseline until then",
        )
    return comparison
