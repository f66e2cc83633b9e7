"""Graphs as `graph.js` draws them: boxes, some of them held by others, and arrows."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from nemo_rl_core.history.records import AncestryGraph, Edge, GraphArtifact, Node
from nemo_rl_core.ui.origins import base_stage
from nemo_rl_core.ui.text import duration, visible

_MAX_OPEN_CHILDREN, _MAX_ALL_OPEN = 12, 40
"""A dynamic or sub-workflow that holds more is drawn closed until it is opened; in a run of more
nodes than the second, all are, but for those in which something runs or failed."""
_WORTH_A_LOOK = ("running", "failed")


def of_execution(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    *,
    artifacts: Collection[tuple[int, str]],
    now: float,
) -> dict[str, Any]:
    """The stages of a run, nested as they called each other.

    Args:
        nodes: Of the run.
        edges: Of the run.
        artifacts: The outputs that are artifacts, by node and name; the others are plain values.
        now: The end, as it were, of what goes on.
    """
    held = Counter(node.parent for node in nodes)
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
                "open": held[node.id] <= _MAX_OPEN_CHILDREN
                and (len(nodes) <= _MAX_ALL_OPEN or node.state in _WORTH_A_LOOK),
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


def of_ancestry(graph: AncestryGraph) -> dict[str, Any]:
    """An artifact and all that it came from: data at the top, the artifact at the bottom.

    Many artifacts of one stage, such as a long training's iterations, are held by one closed box.
    """
    holders = _holders(graph)
    return {
        "direction": "TB",
        "nodes": [
            *holders.values(),
            *(
                {
                    "id": one.id,
                    "parent": holders.get(_base(one), {}).get("id") if one.depth else None,
                    "label": visible(one.artifact.stage if one.artifact else one.id),
                    "state": "",
                    "kind": one.artifact.kind if one.artifact else "unknown",
                    "detail": one.content_hash[:12]
                    + ("" if one.state == "found" else f" {one.state}"),
                    "href": f"/artifacts/{one.id}",
                    "open": True,
                    "here": one.id == graph.root,
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


def _holders(graph: AncestryGraph) -> dict[str, dict[str, Any]]:
    """By the stage a box for its artifacts, where they are many; it leads to the table's rows."""
    alike: dict[str, list[GraphArtifact]] = {}
    for one in graph.artifacts:
        if one.depth and one.artifact is not None:  # what was asked for stands alone
            alike.setdefault(_base(one), []).append(one)
    return {
        stage: {
            "id": f"all:{stage}",
            "parent": None,
            "label": visible(_span(stage, held)),
            "state": "",
            "kind": held[0].artifact.kind if held[0].artifact else "unknown",
            "detail": f"{len(held)} artifacts",
            "href": f"#{held[0].id}",
            "open": False,
        }
        for stage, held in alike.items()
        if len(held) > _MAX_OPEN_CHILDREN
    }


def _span(stage: str, held: Sequence[GraphArtifact]) -> str:
    """Such as `grpo_iteration 1 to 98`, where they are numbered so."""
    words = [one.artifact.stage.partition(" ")[2] for one in held if one.artifact]
    numbers = sorted(int(word) for word in words if word.isdecimal())
    numbered = numbers == list(range(numbers[0], numbers[0] + len(held))) if numbers else False
    return f"{stage} {numbers[0]} to {numbers[-1]}" if numbered else stage


def _base(one: GraphArtifact) -> str:
    return base_stage(one.artifact.stage) if one.artifact else one.id


def _detail(node: Node, now: float) -> str:
    if node.state == "cached":
        return "from an earlier run" if node.cached_from else ""
    # Whole seconds: a running node's figure would else change the graph ten times a second.
    return duration(float(round((node.ended_at or now) - node.started_at, 1)))
