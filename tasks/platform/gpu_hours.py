"""The GPU-hours that a recipe is expected to take, held against its limit."""

import logging
import os

from nemo_rl_core.errors import ResourceError
from nemo_rl_core.planning.published import TOTAL_FACTOR
from nemo_rl_core.telemetry.budget import LIMIT, limit_from
from tasks.platform.gpu_plan import RecipePlan

_LOG = logging.getLogger(__name__)


def over_budget(plan: RecipePlan) -> str | None:
    """What is expected beyond the limit, in a sentence; None within it, and without one."""
    told = limit_from(os.environ.get(LIMIT))
    limit, hours = plan.max_gpu_hours if told is None else told, plan.gpu_hours
    if limit is None or sum(hours.values()) <= limit:
        return None
    parts = ", ".join(f"{name} {value:.4g}" for name, value in hours.items())
    bound = "" if plan.has_mean else "at most "
    return f"{bound}{sum(hours.values()):.4g} GPU-hours are expected ({parts}), of {limit:.4g}"


def hold_to_budget(plan: RecipePlan) -> None:
    """Refuses a recipe that is expected to end at its own limit, before it starts.

    Refused is what is beyond the limit by more than the roofline's own factor, and only where the
    recipe says how long completions are; the log warns of the rest. A limit from the variable is
    warned of alone: a run that goes on takes less than a whole one.

    Raises:
        ResourceError: With the hours of each stage.
    """
    limit, problem = plan.max_gpu_hours, over_budget(plan)
    if problem is None:
        return
    is_certain = limit is not None and sum(plan.gpu_hours.values()) > TOTAL_FACTOR * limit
    if not os.environ.get(LIMIT) and is_certain and plan.has_mean:
        raise ResourceError(
            "the run would reach its limit of GPU-hours before it ends",
            expected=f"at most {limit:.4g} GPU-hours (budget.max_gpu_hours)",
            got=problem,
            fix="raise budget.max_gpu_hours, or take fewer steps; to begin all the same, and stop "
            f"with a save, set {LIMIT}={limit:.4g}",
        )
    _LOG.warning("%s: the stage that reaches the limit saves, and the run ends there", problem)
