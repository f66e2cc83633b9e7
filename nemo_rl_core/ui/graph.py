"""Graphs as `graph.js` draws them: boxes, some of them held by others, and arrows."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from nemo_rl_core.history.records import AncestryGraph, Edge, Node
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
    """An artifact and all that it came from: data at the top, the artifact at the bottom."""
    return {
        "direction": "TB",
        "nodes": [
            {
                "id": one.id,
                "parent": None,
                "label": visible(one.artifact.stage if one.artifact else one.id),
                "state": "",
                "kind": one.artifact.kind if one.artifact else "unknown",
                "detail": one.content_hash[:12] + ("" if one.state == "found" else f" {one.state}"),
                "href": f"/artifacts/{one.id}",
                "open": True,
                "here": one.id == graph.root,
            }
            for one in graph.artifacts
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


def _detail(node: Node, now: float) -> str:
    if node.state == "cached":
        return "from an earlier run" if node.cached_from else ""
    # Whole seconds: a running node's figure would else change the graph ten times a second.
    return duration(float(round((node.ended_at or now) - node.started_at, 1)))
