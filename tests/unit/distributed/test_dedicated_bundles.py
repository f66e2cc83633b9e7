"""Order in which dedicated bundles are reserved and released next to the trainer's."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster

ENGINE = DedicatedBundles("generation", 4, ranks_per_engine=4)
JUDGE, MODEL = DedicatedBundles("judge", 2), DedicatedBundles("reward-model", 1)
Reserved = list[tuple[str, list[int]]]


class Recorded(RayVirtualCluster):
    """Bundles that are recorded and not reserved."""

    events: Reserved

    def bundles(self) -> list[Any]:
        if self._bundles is None:
            self._bundles = []
            self.events.append((self.name, self.bundle_ct_per_node_list))
        return self._bundles

    def with_dedicated(
        self, bundles: DedicatedBundles, *, placed_before: Sequence[DedicatedBundles] = ()
    ) -> RayVirtualCluster:
        cluster = super().with_dedicated(bundles, placed_before=placed_before)
        return of_same_events(self, cluster.bundle_ct_per_node_list, cluster.name)

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


def test_bundles_are_reserved_in_the_order_of_the_plan(make: Callable[..., Any]) -> None:
    session, events = make([8, 6])
    session.reserve_dedicated([ENGINE, JUDGE, MODEL])
    # The engine of four wants a machine; the judge fills what the trainer has left of its second.
    assert events == [
        ("all", [8, 6]),
        ("all-generation", [0, 0, 4]),
        ("all-judge", [0, 2, 0]),
        ("all-reward-model", [0, 0, 1]),
    ]
    session.reserve_dedicated([ENGINE, JUDGE, MODEL])
    assert len(events) == 4
    assert session.dedicated_cluster(JUDGE) is session.dedicated_cluster(
        DedicatedBundles("judge", 2, path="another")
    )


def test_stage_releases_bundles_of_other_groups(make: Callable[..., Any]) -> None:
    session, events = make([4])
    session.reserve_dedicated([ENGINE, JUDGE])
    engine = session.dedicated_cluster(ENGINE)
    session.reserve_dedicated([ENGINE])  # all is there: the judge stays for the next stage
    session.reserve_dedicated(())
    assert [name for name, _ in events] == ["all", "all-generation", "all-judge"]
    events.clear()
    session.reserve_dedicated([ENGINE, MODEL])
    assert events == [("all-judge ends", [0, 2]), ("all-reward-model", [0, 1])]
    assert session.dedicated_cluster(ENGINE) is engine
    events.clear()
    session.reserve_dedicated([DedicatedBundles("generation", 2), MODEL])
    assert events == [("all-generation ends", [4]), ("all-generation", [2])]
    events.clear()
    session.shutdown()
    assert [name for name, _ in events] == ["all-reward-model ends", "all-generation ends",
                                            "all ends"]  # fmt: skip


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_workers_on_all_cores_leave_room_for_other_processes(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = ClusterSession.of(ClusterConfig(num_workers=num_workers)).cluster
    dedicated = cluster.with_dedicated(DedicatedBundles("generation", 10))
    requests = [each._resources["CPU"] * each.world_size for each in (cluster, dedicated)]
    assert sum(requests) <= 2 + 1e-9
    assert requests[0] == (1 if num_workers == 1 else pytest.approx(1.9))


def test_engine_settings_replace_only_their_own_section(make: Callable[..., Any]) -> None:
    session, events = make([2], use_gpus=False)
    session.reserve_dedicated([JUDGE])
    assert events == [("all-judge", [2])]  # processes, next to any number of others
    session.dedicated_cluster(ENGINE).bundles()
    session.dedicated_cluster(DedicatedBundles("generation", 1)).bundles()
    assert events[1:] == [
        ("all-generation", [4]),
        ("all-generation ends", [4]),
        ("all-generation", [1]),
    ]
