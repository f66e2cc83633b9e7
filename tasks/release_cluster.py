"""Task: gives back the Ray cluster that the stages of a run have shared, before the run's end.

It is not cached. A run that fails gives its cluster back in the failure handler of its workflow.
"""

from tasks.artifacts import Checkpoint, Evaluation
from tasks.platform.kubernetes_api import KubernetesApi
from tasks.platform.run_cluster import give_back
from tasks.platform.stage import uncached_task


@uncached_task
def release_cluster(
    trained: Checkpoint, before: Evaluation | None = None, after: Evaluation | None = None
) -> None:
    """Removes it once training and evaluations have ended: no stage after them has workers."""
    give_back(KubernetesApi())
