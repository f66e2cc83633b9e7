"""The limit of GPU-hours in the containers of a cluster."""

import os

from nemo_rl_core.config.budget import BudgetConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.budget import LIMIT, limit_from
from tasks.platform.local import on_cluster


def refuse_limit_that_stages_miss(budget: BudgetConfig) -> None:
    """Refuses a limit of a recipe that the containers of its stages do not know.

    No stage reads the section: on a cluster the limit comes to them by the variable.

    Args:
        budget: The section of the recipe.

    Raises:
        ConfigError: If the variable is not set, or allows more.
    """
    limit = budget.max_gpu_hours
    if limit is None or not on_cluster():
        return
    told = limit_from(os.environ.get(LIMIT))
    if told is None or told > limit:
        raise ConfigError(
            "the stages of this run do not know its limit of GPU-hours",
            expected=f"{LIMIT} of at most {limit:.4g} (budget.max_gpu_hours) in their containers",
            got="none" if told is None else f"{told:.4g}",
            fix=f"start the run with pyflyte run --remote --copy all --env {LIMIT}={limit:.4g}",
        )
