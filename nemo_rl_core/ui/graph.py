"""Graphs as JSON for `graph.js`: nested boxes and arrows."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from nemo_rl_core.history.records import AncestryGraph, Edge, GraphArtifact, Node
from nemo_rl_core.ui.ancestry import base_stage
from nemo_rl_core.ui.text import duration, visible

_MAX_OPEN_CHILDREN, _MAX_ALL_OPEN = 12, 40
"""A dynamic or sub-workflow with more children is initially closed. In a run with more nodes than
the second limit, all of them are initially closed, except those with a running or failed node."""
_OPEN_STATES = ("running", "failed")


def execution_graph(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    *,
    artifacts: Collection[tuple[int, str]],
    now: float,
) -> dict[str, Any]:
    """Returns the stages of a run, nested; `artifacts` are outputs that are not plain values."""
    num_children = Counter(node.parent for node in nodes)
    return {
        "direction": "TB",
        "nodes": [
            {
                "id": node.id,
                "parent": node.parent,
                "label": visible(node.name),
                "state": node.state,
                "kind": node.kind,
                "detail": _detail(node, now),
                "href": f"/nodes/{node.id}",
                "open": num_children[node.id] <= _MAX_OPEN_CHILDREN
                and (len(nodes) <= _MAX_ALL_OPEN or node.state in _OPEN_STATES),
            }
            for node in nodes
        ],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "artifact": (edge.source, edge.source_output) in artifacts,
                "label": visible(f"{edge.source_output} → {edge.target_input}"),
            }
            for edge in edges
        ],
    }


def ancestry_graph(graph: AncestryGraph) -> dict[str, Any]:
    """Returns an artifact and its ancestors: data at the top, the artifact at the bottom.

    Many artifacts of one stage, such as iterations of a long training, share one closed box.
    """
    boxes = _stage_boxes(graph)
    return {
        "direction": "TB",
        "nodes": [
            *boxes.values(),
            *(
                {
                    "id": one.id,
                    "parent": boxes.get(_base(one), {}).get("id") if one.depth else None,
                    "label": visible(one.artifact.stage if one.artifact else one.id),
                    "state": "",
                    "kind": one.artifact.kind if one.artifact else "unknown",
                    "detail": one.content_hash[:12]
                    + ("" if one.state == "found" else f" {one.state}"),
                    "href": f"/artifacts/{one.id}",
                    "open": True,
                    "is_root": one.id == graph.root,
                }
                for one in graph.artifacts
            ),
        ],
        "edges": [
            {
                "source": one.parent,
                "target": one.child,
                "artifact": True,
                "label": visible(one.role),
            }
            for one in graph.parentage
        ],
    }


def _stage_boxes(graph: AncestryGraph) -> dict[str, dict[str, Any]]:
    """Returns one box per stage with many artifacts, with a link to their rows in the table."""
    by_stage: dict[str, list[GraphArtifact]] = {}
    for one in graph.artifacts:
        if one.depth and one.artifact is not None:  # the root is not in a box
            by_stage.setdefault(_base(one), []).append(one)
    return {
        stage: {
            "id": f"all:{stage}",
            "parent": None,
            "label": visible(_span(stage, members)),
            "state": "",
            "kind": members[0].artifact.kind if members[0].artifact else "unknown",
            "detail": f"{len(members)} artifacts",
            "href": f"#{members[0].id}",
            "open": False,
        }
        for stage, members in by_stage.items()
        if len(members) > _MAX_OPEN_CHILDREN
    }


def _span(stage: str, members: Sequence[GraphArtifact]) -> str:
    """Returns text such as `grpo_iteration 1 to 98` for consecutive artifacts."""
    suffixes = [one.artifact.stage.partition(" ")[2] for one in members if one.artifact]
    numbers = sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
    numbered = numbers == list(range(numbers[0], numbers[0] + len(members))) if numbers else False
    return f"{stage} {numbers[0]} to {numbers[-1]}" if numbered else stage


def _base(one: GraphArtifact) -> str:
    return base_stage(one.artifact.stage) if one.artifact else one.id


def _detail(node: Node, now: float) -> str:
    if node.state == "cached":
        return "from an earlier run" if node.cached_from else ""
    # Rounded, since each new duration of a running node changes the graph.
    return duration(float(round((node.ended_at or now) - node.started_at, 1)))
