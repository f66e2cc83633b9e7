"""The list of executions, and the views of one execution."""

import functools
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.history.records import Execution, Node, Page, State
from nemo_rl_core.ui import curves, graph, logs, machine_load
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.pages.parameters import day, history_of, offset, parameter
from nemo_rl_core.ui.templating import render

TABS = ("overview", "graph", "nodes", "timeline", "curves", "log")
_PER_PAGE, _NODES_PER_PAGE = 50, 200
_MAX_DEPTH = 4
_STATES = tuple(state for state in get_args(State) if state != "cached")


def index(request: Request) -> Response:
    """Shows the filtered list of executions."""
    chosen = {name: parameter(request, name) for name in ("state", "workflow", "text", "since")}
    page: Page[Execution] = Page((), 0, 0, _PER_PAGE)
    workflows: list[str] = []
    if not request.app.state.source.is_empty():
        history = history_of(request)
        workflows = history.workflows()
        page = history.executions(
            state=chosen["state"] if chosen["state"] in _STATES else None,  # type: ignore[arg-type]
            workflow=chosen["workflow"] or None,
            text=chosen["text"],
            since=day(request, "since"),
            limit=_PER_PAGE,
            offset=offset(request),
        )
    return render(
        request,
        "executions.html",
        live=any(run.state == "running" for run in page.items) or not page.items,
        section="executions",
        page=page,
        states=_STATES,
        workflows=workflows,
        chosen=chosen,
        filtered=any(chosen.values()),
    )


def _view(tab: str) -> Callable[[Callable[[Request, Execution], dict[str, Any]]], Any]:
    def decorate(content: Callable[[Request, Execution], dict[str, Any]]) -> Any:
        @functools.wraps(content)
        def answer(request: Request) -> Response:
            run = history_of(request).execution(request.path_params["execution"])
            return render(
                request,
                f"execution_{tab}.html",
                live=run.state == "running",
                section="executions",
                tab=tab,
                tabs=TABS,
                run=run,
                **content(request, run),
            )

        return answer

    return decorate


@_view("overview")
def overview(request: Request, run: Execution) -> dict[str, Any]:
    """Shows command, code, cost, errors, inputs and outputs."""
    nodes = history_of(request).nodes(run.id)
    return {
        "command": shlex.join(run.command),
        "cost": total_cost([node.cost for node in nodes if node.state != "cached"]),
        "products": [node for node in nodes if node.kind == "task" and node.summary][-40:],
        "unfinished": [
            node for node in nodes if node.kind == "task" and node.state in ("failed", "stopped")
        ][:40],
    }


@_view("graph")
def graph_view(request: Request, run: Execution) -> dict[str, Any]:
    """Shows the stages and the values passed between them."""
    history = history_of(request)
    stages = graph.execution_graph(
        history.nodes(run.id),
        history.edges(run.id),
        artifacts=history.artifact_outputs(run.id),
        now=time.time(),
    )
    return {"graph": stages}


@dataclass(frozen=True)
class _Row:
    """A node in a table; `left` and `width` are thousandths of the execution's duration."""

    node: Node
    depth: int
    sources: list[Node]
    left: float = 0.0
    width: float = 0.0


@_view("nodes")
def nodes_view(request: Request, run: Execution) -> dict[str, Any]:
    """Shows all nodes as a table."""
    nodes = history_of(request).nodes(run.id)
    by_id = {node.id: node for node in nodes}
    sources: dict[int, dict[int, Node]] = {}
    for edge in history_of(request).edges(run.id):
        if edge.source in by_id:
            sources.setdefault(edge.target, {})[edge.source] = by_id[edge.source]
    page = _page(request, nodes)
    rows = tuple(
        _Row(node, _depth(node, by_id), list(sources.get(node.id, {}).values()))
        for node in page.items
    )
    return {"page": Page(rows, page.total, page.offset, page.limit)}


@_view("timeline")
def timeline(request: Request, run: Execution) -> dict[str, Any]:
    """Shows when each node ran."""
    nodes = history_of(request).nodes(run.id)
    by_id = {node.id: node for node in nodes}
    now = time.time()
    end = run.ended_at if run.ended_at is not None else now
    span = max(end - run.started_at, 0.001)

    def position(moment: float) -> float:
        return min(1000.0, max(0.0, 1000 * (moment - run.started_at) / span))

    page = _page(request, nodes)
    rows = []
    for node in page.items:
        left = position(node.started_at)
        width = position(node.ended_at if node.ended_at is not None else end) - left
        # Nodes that took no time stay visible.
        width = max(width, 4.0)
        left = min(left, 1000 - width)
        rows.append(_Row(node, _depth(node, by_id), [], round(left, 1), round(width, 1)))
    return {"page": Page(tuple(rows), page.total, page.offset, page.limit), "span": span}


@_view("curves")
def curves_view(request: Request, run: Execution) -> dict[str, Any]:
    """Shows metrics of the stages, live while they run."""
    history = history_of(request)
    text = parameter(request, "metric")
    sections = []
    for stage in curves.stages(history, run.id, text=text):
        shown = stage.names[: 4 * curves.SHOWN if text else curves.SHOWN]
        charts = curves.charts(curves.series(history, stage.nodes, shown))
        sections.append((stage, charts, len(stage.names) - len(shown)))
    names = history.metric_names_of(run.id)
    machine = machine_load.charts(history, history.nodes(run.id), names, text=text)
    return {"metric": text, "sections": sections, "machine": machine}


@_view("log")
def log(request: Request, run: Execution) -> dict[str, Any]:
    """Shows the newest records of the run's log, filtered by level and text."""
    chosen = {name: parameter(request, name) for name in ("level", "text", "order", "all")}
    part = logs.newest(
        Path(run.log_path),
        level=chosen["level"],
        text=chosen["text"],
        noisy=chosen["all"] == "yes",
    )
    return {"part": part, "chosen": chosen, "levels": logs.LEVELS[1:-1]}


def _page(request: Request, nodes: Sequence[Node]) -> Page[Node]:
    start = offset(request)
    return Page(tuple(nodes[start : start + _NODES_PER_PAGE]), len(nodes), start, _NODES_PER_PAGE)


def _depth(node: Node, by_id: dict[int, Node]) -> int:
    depth = 0
    while depth < _MAX_DEPTH and node.parent in by_id:
        node, depth = by_id[node.parent], depth + 1
    return depth
