"""The look of a schedule that starts on new rows: a pod without GPUs, for some seconds."""

import logging
import time
from dataclasses import replace
from datetime import timedelta

from flytekit import current_context, task

from tasks.platform import literal_types, local
from tasks.platform.arrivals import look
from tasks.platform.resources import PLAIN
from tasks.recipes.arrivals import WatchedRows

literal_types.register()
local.use_store()

logger = logging.getLogger(__name__)

_KIND = replace(PLAIN, timeout=timedelta(minutes=10))


@task(**_KIND.options)
def look_for_rows(config: WatchedRows) -> str:
    """Starts a run of the schedule where rows lie that none has begun with.

    Args:
        config: The addresses of the rows, and the launch plan.

    Returns:
        What was found and done, in one line.

    Raises:
        NemoRLError: If rows cannot be listed, or Flyte does not answer. The next look tries again.
    """
    from tasks.platform.flyte_runs import FlyteRuns

    execution = current_context().execution_id
    runs = FlyteRuns.of(
        project=execution.project,
        domain=execution.domain,
        name=config.schedule,
        version=config.version,
        endpoint=config.endpoint,
        insecure=config.insecure,
    )
    said = look(config, runs, now=time.time())
    logger.info("%s: %s", config.schedule, said)
    return said
