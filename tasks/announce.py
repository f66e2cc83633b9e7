"""Task: the notice of a run on a cluster that has ended well; a local run sends its own.

It is not cached, so that a run that finds everything in the cache is announced, too. Failed runs
are announced by the failure handler of their workflow.
"""

import os

from nemo_rl_core.telemetry.notices import NOTIFY
from tasks.artifacts import Evaluation, Lineage, Promotion
from tasks.platform.cluster_tracking import track_end
from tasks.platform.local import on_cluster
from tasks.platform.notifying import NOTHING_NEW, cluster_run, notify
from tasks.platform.stage import uncached_task


@uncached_task
def announce(
    lineage: Lineage, decision: Promotion | None = None, after: Evaluation | None = None
) -> None:
    """Tells trackers that the run has succeeded, and sends what it found, or that nothing is new.

    Notices go where `NEMO_RL_NOTIFY` says.
    """
    track_end("succeeded")
    if not on_cluster() or not os.environ.get(NOTIFY):
        return
    maker = lineage.manifest.run
    # Whatever a run makes leads to its report; one of an earlier run means that nothing was made.
    if maker is None or maker.execution != os.environ["FLYTE_INTERNAL_EXECUTION_ID"]:
        notify(cluster_run(), "ended", [NOTHING_NEW])
    else:
        found = [each.summary for each in (decision, after) if each is not None]
        notify(cluster_run(), "succeeded", found or [lineage.summary])
