"""Stages that share a Ray cluster take turns, and the cluster ends when nobody uses it."""

import threading
import time

import pytest

from nemo_rl_core.distributed.session import ClusterSession
from tasks.ray_cluster.experimental.cluster_keeper import keep
from tasks.ray_cluster.experimental.joining import TURN, TURNS, take_turn

pytestmark = pytest.mark.experimental


def test_a_stage_waits_for_the_one_before_and_the_keeper_for_both(session: ClusterSession) -> None:
    from ray.util import list_named_actors

    session.cluster.bundles()  # Ray runs
    turns = [take_turn()]
    assert {"namespace": TURNS, "name": TURN} in list_named_actors(all_namespaces=True)
    kept = threading.Thread(target=keep, args=(TURNS, TURN, 1.0))
    second = threading.Thread(target=lambda: turns.append(take_turn(pause_seconds=0.1)))
    kept.start()
    second.start()
    time.sleep(3)
    assert kept.is_alive() and second.is_alive()
    turns.clear()  # like Ray when a stage's process ends
    second.join(60)
    assert len(turns) == 1
    time.sleep(2)
    assert kept.is_alive()
    turns.clear()
    kept.join(60)
    assert not kept.is_alive()
