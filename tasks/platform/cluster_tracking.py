"""Metrics of a run on a cluster, where every stage is a process of its own.

The section `tracking` of a recipe cannot reach a container: no stage reads what changes no result.
The variable `NEMO_RL_TRACKING` has it instead. A container tells of its stage; how the whole run
has ended is told by its last task, or by its failure handler, since Flyte may try a failed stage
again.
"""

import logging
import os
from contextlib import AbstractContextManager, nullcontext

from nemo_rl_core.config.tracking import OtlpTracker, TrackingConfig
from nemo_rl_core.telemetry.logger_facade import Outcome
from nemo_rl_core.telemetry.trackers import open_tracker
from nemo_rl_core.telemetry.tracking import tracked
from tasks.platform import local

TRACKING = "NEMO_RL_TRACKING"
"""The variable with the section `tracking`, as JSON."""

_LOG = logging.getLogger(__name__)


def tracked_stage() -> AbstractContextManager[None]:
    """Tracks what is reported inside; does nothing in a local run, which is tracked as a whole."""
    config = _config()
    if config is None:
        return nullcontext()
    return tracked(config, os.environ["FLYTE_INTERNAL_EXECUTION_ID"], _labels(), of="stage")


def track_end(outcome: Outcome) -> None:
    """Tells trackers with alerts how the run has ended; does nothing in a local run.

    Args:
        outcome: Of the whole run.
    """
    config = _config()
    for tracker in config.trackers if config else ():
        if isinstance(tracker, OtlpTracker):
            try:
                run = os.environ["FLYTE_INTERNAL_EXECUTION_ID"]
                open_tracker(tracker, run, _labels()).close(outcome)
            except Exception:  # noqa: BLE001  (any error of its library)
                _LOG.warning("%s was not told how the run has ended", tracker.kind, exc_info=True)


def _config() -> TrackingConfig | None:
    said = os.environ.get(TRACKING)
    return TrackingConfig.model_validate_json(said) if said and local.on_cluster() else None


def _labels() -> dict[str, str]:
    # A schedule's launch plan is called after its recipe.
    labels = {
        "workflow": os.environ.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", ""),
        "recipe": os.environ.get("FLYTE_INTERNAL_EXECUTION_LAUNCHPLAN", ""),
    }
    return {name: value.rpartition(".")[2].rpartition(":")[2] for name, value in labels.items()}
