"""Boxes of a graph that are initially open or closed."""

import itertools
from dataclasses import replace

import pytest

from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, GraphArtifact, Node, Parentage
from nemo_rl_core.ui.graph import ancestry_graph, execution_graph


@pytest.mark.parametrize(("num_nodes", "opened"), [(13, True), (14, False)])
def test_a_node_with_many_inner_nodes_is_drawn_closed(num_nodes: int, opened: bool) -> None:
    drawn = execution_graph(_loop(num_nodes), [], artifacts=set(), now=9.0)["nodes"]
    assert drawn[0]["open"] is opened


def test_only_running_and_failed_nodes_of_a_large_run_are_drawn_open() -> None:
    states = ("succeeded", "running", "failed", "cached")
    nodes = [
        replace(
            node,
            id=node.id + 20 * index,
            parent=None if node.parent is None else 20 * index,
            state=state,
        )
        for index, state in enumerate(states, start=1)
        for node in _loop(12)
    ]
    drawn = execution_graph(nodes, [], artifacts=set(), now=9.0)["nodes"]
    opened = [node["state"] for node in drawn if node["kind"] == "dynamic" and node["open"]]
    assert opened == ["running", "failed"]


@pytest.mark.parametrize(("num_iterations", "num_inside"), [(13, 0), (14, 13)])
def test_many_ancestors_of_one_stage_share_a_closed_box(
    num_iterations: int, num_inside: int
) -> None:
    """All except the requested artifact are in the box."""
    drawn = ancestry_graph(_iterations(num_iterations))["nodes"]
    assert sum(node["parent"] is not None for node in drawn) == num_inside
    if num_inside:
        assert drawn[0]["label"] == "grpo_iteration 1 to 13"
        assert drawn[0]["href"] == "#grpo_iteration-13"
        assert not drawn[0]["open"]
        assert [n["label"] for n in drawn if n["parent"] is None] == [
            "grpo_iteration 1 to 13",
            "grpo_iteration 14",
            "train_sft",
        ]


def _iterations(number: int) -> AncestryGraph:
    """Returns the ancestry of the last of many iterations after a supervised start."""
    stages = [f"grpo_iteration {k}" for k in range(number, 0, -1)] + ["train_sft"]
    ids = [stage.replace(" ", "-") for stage in stages]
    rows = [
        ArtifactRow(name, "checkpoint", stage, "hf", "", "", 1, "", {}, None)
        for name, stage in zip(ids, stages, strict=True)
    ]
    return AncestryGraph(
        ids[0],
        tuple(
            GraphArtifact(row.id, "", depth, row, None, "found") for depth, row in enumerate(rows)
        ),
        tuple(Parentage(parent, child, "start") for child, parent in itertools.pairwise(ids)),
    )


def _loop(num_nodes: int) -> list[Node]:
    """Returns a dynamic workflow with inner nodes."""
    return [
        Node(
            id=number,
            execution="x",
            parent=0 if number else None,
            name=f"n{number}",
            task="t",
            kind="task" if number else "dynamic",
            state="succeeded",
            started_at=1.0,
            ended_at=2.0,
            cached_from=None,
            deck_path="",
            cost={},
            summary="",
            error="",
            log_from=None,
            log_to=None,
        )
        for number in range(num_nodes)
    ]
