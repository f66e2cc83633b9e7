"""The notice of how a run ended, wherever it ran."""

import os
from collections.abc import Sequence

from nemo_rl_core.telemetry import notices
from nemo_rl_core.telemetry.events import StageRecord

NOTHING_NEW = "nothing new: every stage was cached, with the same data, settings and source"
"""What a run says that has made nothing."""


def good_end(records: Sequence[StageRecord], lines: Sequence[str]) -> tuple[str, list[str]]:
    """How a run ended that did not fail, in a word and in lines.

    Args:
        records: Its stages.
        lines: What it found.
    """
    if records and all(record.state == "cached" for record in records):
        return "ended", [NOTHING_NEW, *lines]
    return "succeeded", [*lines]


def notify(run: str, how: str, lines: Sequence[str]) -> list[str]:
    """Sends the notice of a run's end, where `NEMO_RL_NOTIFY` names a place.

    Args:
        run: Its workflow, and its name among the runs.
        how: Such as `failed`.
        lines: What else there is to say.

    Returns:
        What was not sent, and why.
    """
    return notices.send(f"nemo-rl: {run} {how}", "\n".join(line for line in lines if line))


def cluster_run() -> str:
    """The execution on a cluster that this process belongs to, by its workflow and name."""
    workflow = os.environ.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", "")
    return f"{workflow.rpartition('.')[2]} {os.environ['FLYTE_INTERNAL_EXECUTION_ID']}".strip()
