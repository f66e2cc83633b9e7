"""What lies beside the trainer's bundles: in which order it is reserved, and what is given back."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster

ENGINE = OwnBundles("generation", 4, ranks_per_engine=4)
JUDGE, MODEL = OwnBundles("judge", 2), OwnBundles("reward-model", 1)
Reserved = list[tuple[str, list[int]]]


class Recorded(RayVirtualCluster):
    """Bundles that are recorded and not reserved."""

    events: Reserved

    def bundles(self) -> list[Any]:
        if self._bundles is None:
            self._bundles = []
            self.events.append((self.name, self.bundle_ct_per_node_list))
        return self._bundles

    def beside(
        self, own: OwnBundles, *, placed_before: Sequence[OwnBundles] = ()
    ) -> RayVirtualCluster:
        found = super().beside(own, placed_before=placed_before)
        return of_same_events(self, found.bundle_ct_per_node_list, found.name)

    def shutdown(self) -> None:
        if self._bundles is not None:
            self.events.append((f"{self.name} ends", self.bundle_ct_per_node_list))
        self._bundles = None


def of_same_events(first: Recorded, counts: list[int], name: str) -> Recorded:
    made = Recorded(counts, first.use_gpus, first.num_gpus_per_node, name=name)
    made.events = first.events
    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., Any]:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))

    def session(counts: list[int], *, use_gpus: bool = True) -> tuple[ClusterSession, Reserved]:
        cluster = Recorded(counts, use_gpus, name="all")
        cluster.events = []
        return ClusterSession(cluster), cluster.events

    return session


def test_all_is_reserved_in_the_order_of_the_plan(make: Callable[..., Any]) -> None:
    session, events = make([8, 6])
    session.reserve_beside([ENGINE, JUDGE, MODEL])
    # The engine of four wants a machine; the judge fills what the trainer has left of its second.
    assert events == [
        ("all", [8, 6]),
        ("all-generation", [0, 0, 4]),
        ("all-judge", [0, 2, 0]),
        ("all-reward-model", [0, 0, 1]),
    ]
    session.reserve_beside([ENGINE, JUDGE, MODEL])
    assert len(events) == 4
    assert session.beside(JUDGE) is session.beside(OwnBundles("judge", 2, path="another"))


def test_a_stage_gives_back_what_only_others_had(make: Callable[..., Any]) -> None:
    session, events = make([4])
    session.reserve_beside([ENGINE, JUDGE])
    engine = session.beside(ENGINE)
    session.reserve_beside([ENGINE])  # all is there: the judge stays for the next stage
    session.reserve_beside(())
    assert [name for name, _ in events] == ["all", "all-generation", "all-judge"]
    events.clear()
    session.reserve_beside([ENGINE, MODEL])
    assert events == [("all-judge ends", [0, 2]), ("all-reward-model", [0, 1])]
    assert session.beside(ENGINE) is engine
    events.clear()
    session.reserve_beside([OwnBundles("generation", 2), MODEL])
    assert events == [("all-generation ends", [4]), ("all-generation", [2])]
    events.clear()
    session.shutdown()
    assert [name for name, _ in events] == ["all-reward-model ends", "all-generation ends",
                                            "all ends"]  # fmt: skip


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_as_many_workers_as_cores_leave_room_for_processes_beside_them(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = ClusterSession.of(ClusterConfig(num_workers=num_workers)).cluster
    beside = cluster.beside(OwnBundles("generation", 10))
    asked = [each._resources["CPU"] * each.world_size for each in (cluster, beside)]
    assert sum(asked) <= 2 + 1e-9
    assert asked[0] == (1 if num_workers == 1 else pytest.approx(1.9))


def test_an_engine_alone_replaces_only_its_own(make: Callable[..., Any]) -> None:
    session, events = make([2], use_gpus=False)
    session.reserve_beside([JUDGE])
    assert events == [("all-judge", [2])]  # processes, beside any number of others
    session.beside(ENGINE).bundles()
    session.beside(OwnBundles("generation", 1)).bundles()
    assert events[1:] == [
        ("all-generation", [4]),
        ("all-generation ends", [4]),
        ("all-generation", [1]),
    ]
