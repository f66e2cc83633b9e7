"""Stages that share a Ray cluster take turns, and the cluster ends when nobody uses it."""

import threading
import time

import pytest

from nemo_rl_core.distributed.session import ClusterSession
from tasks.platform.cluster_keeper import keep
from tasks.platform.joining import TURN, TURNS, take_turn

pytestmark = pytest.mark.slow


def test_a_stage_waits_for_the_one_before_and_the_keeper_for_both(session: ClusterSession) -> None:
    from ray.util import list_named_actors

    session.cluster.bundles()  # Ray runs
    held = [take_turn()]
    assert {"namespace": TURNS, "name": TURN} in list_named_actors(all_namespaces=True)
    kept = threading.Thread(target=keep, args=(TURNS, TURN, 1.0))
    second = threading.Thread(target=lambda: held.append(take_turn(pause_seconds=0.1)))
    kept.start()
    second.start()
    time.sleep(3)
    assert kept.is_alive() and second.is_alive()
    held.clear()  # as Ray does when a stage's process ends
    second.join(60)
    assert len(held) == 1
    time.sleep(2)
    assert kept.is_alive()
    held.clear()
    kept.join(60)
    assert not kept.is_alive()
