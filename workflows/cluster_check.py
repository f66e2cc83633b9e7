"""What the stages need of a cluster, tried before the first run; `nemo-rl cluster-check` reads it.

Checks do not depend on one another, and one that fails ends none of the others.
"""

from flytekit import workflow
from flytekit.core.workflow import WorkflowFailurePolicy

from nemo_rl_core.config.cluster import ClusterConfig
from tasks import cluster_check as checks


@workflow(failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE)
def check_cluster(
    cluster: ClusterConfig, key: str, wait_seconds: float = 300.0, autoscaled: bool = False
) -> None:
    """Tries pods, bucket, volume, Ray and notices, all at once.

    The nodes are called after the names in `tasks/cli/cluster_check.py`.

    Args:
        cluster: Whose shape the RayJobs have.
        key: Another one each time, for files that two pods know.
        wait_seconds: How long the pods of the volume wait for each other.
        autoscaled: Whether machines are added for pods that wait.
    """
    checks.start_pod().with_overrides(node_name="pods")
    written = checks.write_to_bucket(key=key).with_overrides(node_name="bucket-written")
    checks.read_from_bucket(written=written, key=key).with_overrides(node_name="bucket")
    for share, name in ((checks.share_volume, "volume-back"), (checks.join_volume, "volume")):
        share(key=key, wait_seconds=wait_seconds).with_overrides(node_name=name)
    nodes = checks.find_nodes(cluster=cluster, autoscaled=autoscaled)
    nodes.with_overrides(node_name="nodes")
    checks.find_rights(cluster=cluster).with_overrides(node_name="rights")
    checks.try_ray(cluster=cluster).with_overrides(node_name="ray")
    checks.try_engines(cluster=cluster).with_overrides(node_name="engines")
    checks.send_notices().with_overrides(node_name="notices")
