"""A stage's pod joins the Ray cluster of its run, retries, and leaves it."""

import os
import subprocess

import pytest

from nemo_rl_core.errors import ResourceError
from tasks.ray_cluster.experimental import joining

pytestmark = pytest.mark.experimental


class Ray:
    """The command `ray`, of which the first starts fail."""

    def __init__(self, *, num_failures: int) -> None:
        self._num_failures = num_failures
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str]":
        self.commands.append(words)
        fails = words[0] == "start" and self._num_failures > 0
        self._num_failures -= words[0] == "start"
        return subprocess.CompletedProcess(words, int(fails), "", "a\nGCS is not there\n\n")


def joined_with(monkeypatch: pytest.MonkeyPatch, ray: Ray, *addresses: str) -> str:
    """The address inside; `RAY_ADDRESS` has another value before and after."""
    monkeypatch.setattr(joining, "_ray", ray)
    monkeypatch.setattr(joining.time, "sleep", lambda _seconds: None)
    monkeypatch.setenv("RAY_ADDRESS", "before")
    remaining = iter(addresses)
    with joining.joined(lambda: next(remaining), num_attempts=2):
        within = os.environ["RAY_ADDRESS"]
    assert os.environ["RAY_ADDRESS"] == "before"
    return within


def test_a_pod_is_a_node_without_cpus_while_its_stage_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(num_failures=0)
    assert joined_with(monkeypatch, ray, "head:6379") == "head:6379"
    start, stop = ray.commands
    assert {"--address=head:6379", "--num-cpus=0", "--num-gpus=0"} <= set(start)
    assert stop == ("stop",)


def test_a_replaced_cluster_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(num_failures=1)
    assert joined_with(monkeypatch, ray, "old:6379", "new:6379") == "new:6379"
    assert [words[0] for words in ray.commands] == ["start", "stop", "start", "stop"]


def test_a_cluster_that_cannot_be_joined_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="cannot be joined") as caught:
        joined_with(monkeypatch, Ray(num_failures=2), "one:6379", "two:6379")
    assert (caught.value.expected, caught.value.got) == (
        "a head that answers at two:6379",
        "GCS is not there",
    )


def test_the_stage_leaves_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(num_failures=0)
    monkeypatch.setattr(joining, "_ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RuntimeError, match="out of paper"), joining.joined(lambda: "head:6379"):
        raise RuntimeError("out of paper")
    assert ray.commands[-1] == ("stop",)
    assert "RAY_ADDRESS" not in os.environ
