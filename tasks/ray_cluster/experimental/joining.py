"""Joins a run's Ray cluster as a node without CPUs, and waits while another stage uses it."""

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

_LOG = logging.getLogger(f"nemo_rl_core.{__name__}")  # prefix of the run's log

TURNS, TURN = "nemo-rl-flow", "turn"
"""Namespace and name of the actor that a stage has in Ray while it uses the cluster."""

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_NUM_ATTEMPTS = 10  # Ray waits for a head by itself, up to a minute each time


@contextmanager
def joined(find: Callable[[], str], *, num_attempts: int = _NUM_ATTEMPTS) -> Iterator[None]:
    """Makes this pod a node of the cluster, without Ray workers, inside the `with` block.

    Args:
        find: Returns the address of the cluster's head; called again after a failed attempt.
        num_attempts: Maximum number of attempts.
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
                fix="look at the head's pod, and for a network policy that separates the two pods",
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

    Stages that do not depend on each other may start at once, and each one uses the full cluster.
    Keep the returned object while the stage uses the cluster; it ends with the process.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Turn:
        """Local, so that Ray pickles it by value: a worker would import this module slowly."""

        def is_taken(self) -> bool:
            return True

    own_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0)(Turn).options(
        name=TURN, namespace=TURNS, scheduling_strategy=own_node, runtime_env={}
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
    _ray("stop")


def _ray(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*_RAY, *words], check=False, capture_output=True, text=True)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason was given"
