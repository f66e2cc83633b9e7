"""Files are sent and received by the machines of a Ray cluster that wrote them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from nemo_rl_core.checkpoints.object_saves import (
    LARGE_BYTES,
    StoredFile,
    Transfer,
    deliver,
    receive,
    send,
)
from nemo_rl_core.distributed.machines import balanced, on_machines
from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import hash_file, list_files


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """A head without CPUs, and two other nodes."""
    import ray
    from ray.cluster_utils import Cluster

    from nemo_rl_core.distributed import session as sessions

    shared = dict(sessions._sessions)
    sessions.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    added = [cluster.add_node(num_cpus=1).node_id for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield sorted(added)
    ray.shutdown()
    cluster.shutdown()
    # Other tests use the shared session, which starts Ray again; a second one would take its CPUs.
    sessions._sessions.update(shared)


def transfers(folder: Path, machines: Sequence[str]) -> list[Transfer]:
    made = []
    for number, machine in enumerate(machines):
        path = folder / f"{number}"
        path.write_text(f"shard {number}")
        digest = hash_file(path)
        address = str(folder / "store" / digest)
        made.append(Transfer(path, StoredFile(digest, path.stat().st_size, address, machine)))
    return made


def write_locations(system: Any, moves: Sequence[Transfer]) -> None:
    """Instead of a transfer, records for each file which machine was asked to move it."""
    import os

    import ray

    for each in moves:
        location = f"{ray.get_runtime_context().get_node_id()} {os.getpid()}"
        Path(f"{each.path}.location").write_text(location)


def locations(moves: Sequence[Transfer]) -> list[list[str]]:
    return [Path(f"{each.path}.location").read_text().split() for each in moves]


@pytest.mark.thorough
def test_each_machine_moves_its_own_files(tmp_path: Path, nodes: list[str]) -> None:
    one, two = nodes
    moves = transfers(tmp_path, [one, two, "", two])
    on_machines(write_locations, None, moves)
    moved_by = locations(moves)
    assert [node for node, _ in moved_by[:2]] == [one, two]
    assert moved_by[2][0] not in nodes  # unknown machine: this process, on the head
    assert moved_by[3][0] == two
    # Machines of a cluster that no longer exists: one machine each.
    old = transfers(tmp_path, ["gone 1", "gone 2", "gone 1", "gone 3"])
    on_machines(write_locations, None, old)
    assert [node for node, _ in locations(old)] == [one, two, one, one]
    # The files that they move arrive and are verified there.
    system = fsspec.filesystem("file", auto_mkdir=True)
    on_machines(send, system, moves)
    back = [Transfer(tmp_path / "back" / each.path.name, each.file) for each in moves]
    on_machines(receive, system, back)
    assert [each.path.read_text() for each in back] == [f"shard {n}" for n in range(4)]
    Path(moves[1].file.address).write_text("other")
    with pytest.raises(StoreError, match="is damaged"):
        on_machines(receive, system, back)


@pytest.mark.thorough
def test_the_machines_deliver_an_artifact(tmp_path: Path, nodes: list[str]) -> None:
    one, two = nodes
    system = fsspec.filesystem("file", auto_mkdir=True)
    saved = transfers(tmp_path, [one, two])
    on_machines(send, system, saved)
    # The files of a save are not read again, wherever they are.
    target = str(tmp_path / "artifact")
    copies = [
        Transfer(
            Path("gone"),
            replace(each.file, address=f"{target}/{each.path.name}"),
            copied_from=each.file.address,
        )
        for each in saved
    ]
    large = []
    for number in range(3):
        path = tmp_path / f"large-{number}"
        path.write_bytes(b"x" * LARGE_BYTES)
        large.append(Transfer(path, StoredFile("", LARGE_BYTES, f"{target}/{path.name}")))
    on_machines(deliver, system, [*copies, *large])
    assert {
        name: (tmp_path / "artifact" / name).stat().st_size for name in list_files(Path(target))
    } == {
        **{each.path.name: each.file.num_bytes for each in saved},
        **{each.path.name: LARGE_BYTES for each in large},
    }
    assert [Path(each.file.address).read_text() for each in copies] == ["shard 0", "shard 1"]
    on_machines(write_locations, None, large)
    assert Counter(node for node, _ in locations(large)) in ({one: 2, two: 1}, {one: 1, two: 2})


def test_parts_are_of_about_equal_size() -> None:
    def of(size: int) -> Transfer:
        return Transfer(Path("x"), StoredFile("", size, ""))

    parts = balanced([of(1), of(9), of(4), of(5)], 2)
    assert Counter(sum(each.file.num_bytes for each in part) for part in parts) == {9: 1, 10: 1}
    assert balanced([], 4) == []
    assert len(balanced([of(1)], 4)) == 1
