"""Stages on a cluster, inside the container: tracking, limit of GPU-hours, closing of S3.

The variables `NEMO_RL_TRACKING` and `NEMO_RL_MAX_GPU_HOURS` carry the sections `tracking` and
`budget` of the recipe into the containers, since stages do not read them. A container tracks its
own stage. The last task of the run, or its failure handler, tracks how the run ended, because Flyte
may retry a failed stage.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext

from flytekit.utils.asyn import run_sync

from nemo_rl_core.config.tracking import BudgetConfig, OtlpTracker, TrackingConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.budget import LIMIT, limit_from
from nemo_rl_core.telemetry.logger_facade import Outcome
from nemo_rl_core.telemetry.trackers import open_tracker
from nemo_rl_core.telemetry.tracking import tracked
from tasks.flyte import local

TRACKING = "NEMO_RL_TRACKING"
"""The variable with the section `tracking`, as JSON."""

_CLOSE_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


def tracked_stage() -> AbstractContextManager[None]:
    """Tracks reports in the `with` block; does nothing in a local run, where the run is tracked."""
    config = _config()
    if config is None:
        return nullcontext()
    return tracked(config, os.environ["FLYTE_INTERNAL_EXECUTION_ID"], _labels(), part="stage")


def track_end(outcome: Outcome) -> None:
    """Informs OTLP trackers, for their alerts, how the run ended; does nothing in a local run."""
    config = _config()
    for tracker in config.trackers if config else ():
        if isinstance(tracker, OtlpTracker):
            try:
                run = os.environ["FLYTE_INTERNAL_EXECUTION_ID"]
                open_tracker(tracker, run, _labels()).close(outcome)
            except Exception:  # noqa: BLE001  (any error of its library)
                _LOG.warning(
                    "%s was not informed of the end of the run", tracker.kind, exc_info=True
                )


def _config() -> TrackingConfig | None:
    section = os.environ.get(TRACKING)
    if not section or not local.on_cluster():
        return None
    return TrackingConfig.model_validate_json(section)


def _labels() -> dict[str, str]:
    # A schedule's launch plan is named after its recipe.
    labels = {
        "workflow": os.environ.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", ""),
        "recipe": os.environ.get("FLYTE_INTERNAL_EXECUTION_LAUNCHPLAN", ""),
    }
    return {name: value.rpartition(".")[2].rpartition(":")[2] for name, value in labels.items()}


def refuse_limit_unknown_to_stages(budget: BudgetConfig) -> None:
    """Refuses a run whose containers were not given the recipe's limit of GPU-hours."""
    limit = budget.max_gpu_hours
    if limit is None or not local.on_cluster():
        return
    variable = limit_from(os.environ.get(LIMIT))
    if variable is None or variable > limit:
        raise ConfigError(
            "the stages of this run do not have its limit of GPU-hours",
            expected=f"{LIMIT} of at most {limit:.4g} (budget.max_gpu_hours) in their containers",
            got="none" if variable is None else f"{variable:.4g}",
            fix=f"start the run with pyflyte run --remote --copy all --env {LIMIT}={limit:.4g}",
        )


def close_sessions_at_exit() -> None:
    """Closes the sessions of S3 file systems when this process ends.

    s3fs closes only its own sessions. Those of flytekit are in a loop that ends before they are
    closed, and aiohttp then logs each as an error with a traceback, as if the stage had failed.
    """
    # The last registered function is called first, and flytekit's loop registers its own end.
    run_sync(asyncio.sleep, 0)
    atexit.register(run_sync, _close_sessions)


async def _close_sessions() -> None:
    s3fs = sys.modules.get("s3fs")
    if s3fs is None:
        return
    for system in list(s3fs.S3FileSystem._cache.values()):
        if system.asynchronous and system._s3 is not None:
            # The stage has ended, so an error here is harmless.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(
                    system._s3creator.__aexit__(None, None, None), _CLOSE_SECONDS
                )
