"""Compares the expected GPU-hours of a recipe with its limit."""

import logging
import os

from nemo_rl_core.errors import ResourceError
from nemo_rl_core.planning.speed import TOTAL_FACTOR
from nemo_rl_core.telemetry.budget import LIMIT, limit_from
from tasks.planning.gpu_plan import RecipePlan

_LOG = logging.getLogger(__name__)


def over_budget(plan: RecipePlan) -> str | None:
    """Describes the excess over the limit in a sentence; None within it, or without one."""
    variable_limit = limit_from(os.environ.get(LIMIT))
    limit, hours = plan.max_gpu_hours if variable_limit is None else variable_limit, plan.gpu_hours
    if limit is None or sum(hours.values()) <= limit:
        return None
    parts = ", ".join(f"{name} {value:.4g}" for name, value in hours.items())
    bound = "" if plan.has_mean_length else "at most "
    total = f"{bound}{sum(hours.values()):.4g}"
    return f"{total} GPU-hours are expected ({parts}); the limit is {limit:.4g}"


def check_budget(plan: RecipePlan) -> None:
    """Refuses a recipe that is expected to reach its own limit, before it starts.

    A recipe is refused if it exceeds the limit by more than the error factor of the roofline, and
    only if it states the length of completions; otherwise the log warns. A limit from the variable
    only causes a warning: a resumed run takes less than a complete one.
    """
    limit, problem = plan.max_gpu_hours, over_budget(plan)
    if problem is None:
        return
    is_certain = limit is not None and sum(plan.gpu_hours.values()) > TOTAL_FACTOR * limit
    if not os.environ.get(LIMIT) and is_certain and plan.has_mean_length:
        raise ResourceError(
            "the run would reach its limit of GPU-hours before it ends",
            expected=f"at most {limit:.4g} GPU-hours (budget.max_gpu_hours)",
            got=problem,
            fix="raise budget.max_gpu_hours, or take fewer steps; to start anyway, and stop "
            f"with a save, set {LIMIT}={limit:.4g}",
        )
    _LOG.warning("%s: the stage that reaches the limit saves, and the run ends there", problem)
