"""Sends the notice of how a run ended, on any machine."""

import os
from collections.abc import Sequence

from nemo_rl_core.telemetry import notices
from nemo_rl_core.telemetry.events import StageRecord

NOTHING_NEW = "nothing new: every stage was cached, with the same data, settings and source"


def successful_end(records: Sequence[StageRecord], lines: Sequence[str]) -> tuple[str, list[str]]:
    """Describes the end of a run that did not fail, in a word and in lines."""
    if records and all(record.state == "cached" for record in records):
        return "ended", [NOTHING_NEW, *lines]
    return "succeeded", [*lines]


def notify(run: str, how: str, lines: Sequence[str]) -> list[str]:
    """Sends the notice of a run's end, if `NEMO_RL_NOTIFY` has an address.

    Returns:
        Notices that were not sent, with the reason.
    """
    return notices.send(f"nemo-rl: {run} {how}", "\n".join(line for line in lines if line))


def cluster_run() -> str:
    """Returns the execution on a cluster that this process belongs to, by workflow and name."""
    workflow = os.environ.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", "")
    return f"{workflow.rpartition('.')[2]} {os.environ['FLYTE_INTERNAL_EXECUTION_ID']}".strip()
