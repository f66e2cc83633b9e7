"""Task: releases the Ray cluster that the stages of a run share, before the end of the run.

It is not cached. A failed run releases its cluster in the failure handler of its workflow.
"""

from tasks.artifacts import Checkpoint, Evaluation
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi
from tasks.ray_cluster.experimental.run_cluster import give_back
from tasks.stage.stage import uncached_task


@uncached_task
def release_cluster(
    trained: Checkpoint, before: Evaluation | None = None, after: Evaluation | None = None
) -> None:
    """Removes it after training and evaluations: later stages have no workers."""
    give_back(RayJobApi())
