"""Keeps the Ray cluster of a run alive until no stage has used it for a while.

KubeRay removes the cluster when this program ends. It is sent as text, since the head's image does
not contain the code of this project, and so it imports nothing but Ray.

    python cluster_keeper.py NAMESPACE NAME IDLE_SECONDS
"""

import sys
import time

import ray
from ray.util import list_named_actors


def keep(namespace: str, name: str, idle_seconds: float) -> None:
    """Returns when no actor has had that name for that long: a stage has one while it runs."""
    actor = {"namespace": namespace, "name": name}
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_seconds:
        if actor in list_named_actors(all_namespaces=True):
            idle_since = time.monotonic()
        time.sleep(min(idle_seconds / 10, 5.0))


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    keep(sys.argv[1], sys.argv[2], float(sys.argv[3]))
