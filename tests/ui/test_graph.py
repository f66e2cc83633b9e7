"""Which boxes of a graph start open, and which start closed."""

import itertools
from dataclasses import replace

import pytest

from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, GraphArtifact, Node, Parentage
from nemo_rl_core.ui.graph import of_ancestry, of_execution


@pytest.mark.parametrize(("num_nodes", "opened"), [(13, True), (14, False)])
def test_what_holds_many_nodes_is_drawn_closed(num_nodes: int, opened: bool) -> None:
    drawn = of_execution(_loop(num_nodes), [], artifacts=set(), now=9.0)["nodes"]
    assert drawn[0]["open"] is opened


def test_of_a_large_run_only_what_is_worth_a_look_is_drawn_open() -> None:
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
    drawn = of_execution(nodes, [], artifacts=set(), now=9.0)["nodes"]
    opened = [node["state"] for node in drawn if node["kind"] == "dynamic" and node["open"]]
    assert opened == ["running", "failed"]


@pytest.mark.parametrize(("num_iterations", "held"), [(13, 0), (14, 13)])
def test_many_ancestors_of_one_stage_are_held_by_a_closed_box(
    num_iterations: int, held: int
) -> None:
    """All but the artifact that was asked for."""
    drawn = of_ancestry(_iterations(num_iterations))["nodes"]
    assert sum(node["parent"] is not None for node in drawn) == held
    if held:
        assert drawn[0]["label"] == "grpo_iteration 1 to 13"
        assert drawn[0]["href"] == "#grpo_iteration-13"
        assert not drawn[0]["open"]
        assert [n["label"] for n in drawn if n["parent"] is None] == [
            "grpo_iteration 1 to 13",
            "grpo_iteration 14",
            "train_sft",
        ]


def _iterations(number: int) -> AncestryGraph:
    """The last of many iterations that began with a supervised model."""
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
    """A dynamic and what it holds."""
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
