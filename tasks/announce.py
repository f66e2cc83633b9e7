"""Task: the notice of a successful run on a cluster; a local run sends its own.

It is not cached, so that a run that finds everything in the cache is announced, too. The failure
handler of a workflow announces failed runs.
"""

import os

from nemo_rl_core.telemetry.notices import NOTIFY
from tasks.artifacts import Evaluation, Lineage, Promotion
from tasks.flyte.local import on_cluster
from tasks.stage.container import track_end
from tasks.stage.notifying import NOTHING_NEW, cluster_run, notify
from tasks.stage.stage import uncached_task


@uncached_task
def announce(
    lineage: Lineage, decision: Promotion | None = None, after: Evaluation | None = None
) -> None:
    """Tells trackers that the run has succeeded, and sends its results, or that nothing is new.

    Notices go where `NEMO_RL_NOTIFY` says.
    """
    track_end("succeeded")
    if not on_cluster() or not os.environ.get(NOTIFY):
        return
    maker = lineage.manifest.run
    # All new artifacts lead to the report; a report of an earlier run means that nothing was made.
    if maker is None or maker.execution != os.environ["FLYTE_INTERNAL_EXECUTION_ID"]:
        notify(cluster_run(), "ended", [NOTHING_NEW])
    else:
        summaries = [each.summary for each in (decision, after) if each is not None]
        notify(cluster_run(), "succeeded", summaries or [lineage.summary])
