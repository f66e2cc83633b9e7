"""Tests what the stages need of a cluster; used by `nemo-rl cluster-check` before the first run.

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
    """Tests pods, bucket, volume, Ray and notices, all at once.

    The nodes have the names in `NODES` of `tasks/cli/machine/flyte_cluster_check.py`.

    Args:
        cluster: Section with the shape of the RayJobs.
        key: A new value each time, for files that two pods expect.
        wait_seconds: Time limit for the pods of the volume to see each other.
        autoscaled: Whether machines are added for waiting pods.
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
