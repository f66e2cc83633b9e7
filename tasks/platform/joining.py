"""How a stage joins the Ray cluster of its run: as a node without CPUs, and when it is its turn."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_core.errors import ResourceError
from nemo_rl_core.telemetry.waiting import waiting

_LOG = logging.getLogger(f"nemo_rl_core.{__name__}")  # the run's log takes this one's

TURNS, TURN = "nemo-rl-flow", "turn"
"""Namespace and name of the actor that a stage has in Ray while it uses the cluster."""

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_NUM_ATTEMPTS = 10  # Ray waits for a head by itself, up to a minute each time


@contextmanager
def joined(find: Callable[[], str], *, num_attempts: int = _NUM_ATTEMPTS) -> Iterator[None]:
    """Within it this pod is a node of the cluster, on which Ray places no workers.

    Args:
        find: Returns the address of the cluster's head; asked again where it cannot be joined.
        num_attempts: How often to try.

    Raises:
        ResourceError: If it cannot be joined; Flyte tries again what a stage has not raised itself.
    """
    for attempts_left in reversed(range(num_attempts)):
        address = find()
        node = ["start", f"--address={address}", "--num-cpus=0", "--num-gpus=0"]
        with waiting(f"joining the run's Ray cluster at {address}"):
            tried = _ray(*node, "--disable-usage-stats")
        if not tried.returncode:
            break
        _LOG.warning("the Ray cluster at %s cannot be joined: %s", address, _last(tried.stderr))
        _leave()
        if not attempts_left:
            raise ResourceError(
                "the Ray cluster of the run cannot be joined",
                expected=f"a head that answers at {address}",
                got=_last(tried.stderr),
                fix="look at the head's pod, and whether a network policy parts it from this one",
            )
        time.sleep(2)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before
        _leave()


def take_turn(*, pause_seconds: float = 2.0) -> Any:
    """Waits until no other stage uses the cluster; Ray must be connected.

    Stages without a parent in common run side by side, and each one takes the whole cluster.

    Returns:
        What this stage must hold while it uses the cluster. Ray ends it with the stage's process.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Turn:
        """Sent by value: a worker finds this module only after many imports."""

        def is_taken(self) -> bool:
            return True

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0)(Turn).options(
        name=TURN, namespace=TURNS, scheduling_strategy=here, runtime_env={}
    )
    with waiting("waiting for the stage that uses the run's Ray cluster"):
        while True:
            try:
                turn = actor.remote()
            except ValueError:  # the name is taken
                time.sleep(pause_seconds)
            else:
                ray.get(turn.is_taken.remote())
                return turn


def _leave() -> None:
    """Ends the pod's own Ray node, so that the cluster does not wait for its heartbeats."""
    _ray("stop")


def _ray(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*_RAY, *words], check=False, capture_output=True, text=True)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason was given"
