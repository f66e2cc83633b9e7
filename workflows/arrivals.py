"""The look of `nemo-rl schedule --on-arrival`, which registers a launch plan for each schedule."""

from flytekit import workflow

from tasks.look_for_rows import look_for_rows as look
from tasks.recipes.arrivals import WatchedRows


@workflow
def look_for_rows(config: WatchedRows) -> str:
    """Starts a run of a schedule where new rows have arrived.

    Args:
        config: The addresses of the rows, and the launch plan.
    """
    return look(config=config)
