"""The list of executions, and the views of one execution."""

import functools
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.records import Execution, Node, Page, State
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import (
    COLUMNS,
    DEFAULT_COLUMNS,
    Group,
    RunRow,
    differing,
    grouped,
    page_record,
    run_record,
    shown_settings,
    value_of,
)
from nemo_rl_core.history.run_results import sparkline
from nemo_rl_core.ui import graph, logs
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.live import run_status
from nemo_rl_core.ui.pages import curves
from nemo_rl_core.ui.pages.parameters import day, history_of, offset, parameter
from nemo_rl_core.ui.plots import sparkline_points
from nemo_rl_core.ui.templating import render

TABS = ("overview", "graph", "nodes", "timeline", "curves", "log")
_PER_PAGE, _NODES_PER_PAGE = 50, 200
_MAX_DEPTH = 4
_STATES = tuple(state for state in get_args(State) if state != "cached")


NUMERIC = (
    *("before", "accuracy", "gain", "reward", "loss", "step", "took", "tokens", "gpu_hours"),
    *("money", "stages", "cached"),
)
"""Columns of numbers, which groups average."""
GROUPS = ("sweep", "recipe", "seed")


def index(request: Request) -> Response:
    """Shows runs and points of sweeps, filtered, sorted and grouped by the address, or as JSON."""
    names = ("state", "workflow", "text", "since", "tag", "where", "sort", "group", "extra")
    chosen = {name: parameter(request, name) for name in names}
    columns = [name for name in request.query_params.getlist("column") if name in COLUMNS]
    columns = [*(columns or DEFAULT_COLUMNS), *_words(chosen["extra"])]
    page: Page[RunRow] = Page((), 0, 0, _PER_PAGE)
    context: dict[str, Any] = {"workflows": [], "refused": "", "groups": (), "sparks": {}}
    if chosen["state"] not in ("", *_STATES):
        states = ", ".join(_STATES)
        context["refused"] = f"no run has the state {chosen['state']!r}: use one of {states}"
    elif not request.app.state.source.is_empty():
        history = history_of(request)
        context["workflows"] = history.workflows()
        query = RunQuery(
            state=chosen["state"],
            workflow=chosen["workflow"],
            text=chosen["text"],
            since=day(request, "since"),
            tag=chosen["tag"],
            where=_words(chosen["where"]),
            sort=chosen["sort"],
            limit=None if chosen["group"] else _PER_PAGE,
            offset=0 if chosen["group"] else offset(request),
            columns=[*({chosen["group"]} - {"", *GROUPS}), *_words(chosen["extra"])],
        )
        try:
            page = run_rows(history, query)
        except ConfigError as error:
            context["refused"] = str(error)
        shown = page.items
        if chosen["group"]:
            context["groups"], page, shown = _grouped(request, page, chosen["group"])
        context["sparks"] = {
            row.id: sparkline_points(sparkline(history, row.results, row.ended_at)) for row in shown
        }
    if request.url.path.endswith(".json"):
        refused = {"error": context["refused"]} if context["refused"] else None
        return _json(refused or page_record(page), 400 if refused else 200)
    names_of = differing(page.items)
    if not request.query_params.getlist("column"):
        columns = [each for each in columns if each not in COLUMNS or _has_value(page.items, each)]
    return render(
        request,
        "executions.html",
        live=any(run.state == "running" for run in page.items)
        or not (page.items or context["refused"]),
        section="executions",
        page=page,
        states=_STATES,
        chosen=chosen,
        columns=columns,
        all_columns=COLUMNS,
        headings={name: COLUMNS[name].heading if name in COLUMNS else name for name in columns},
        value=value_of,
        settings={row.id: _as_texts(_beyond_name(row, names_of[row.id])) for row in page.items},
        numeric=NUMERIC,
        group_by=GROUPS,
        opened=request.query_params.getlist("open"),
        filtered=any(chosen[name] for name in names[:6]),
        **context,
    )


def as_json(request: Request) -> Response:
    """Returns a run with its nodes, as `nemo-rl runs RUN --json` does."""
    history = history_of(request)
    return _json(run_record(history, run_row(history, request.path_params["execution"])))


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(redacted(json.dumps(value)), status, media_type="application/json")


def _grouped(
    request: Request, page: Page[RunRow], by: str
) -> tuple[Sequence[Group], Page[RunRow], tuple[RunRow, ...]]:
    """Returns the groups of the page, the page that counts groups, and the rows of open groups."""
    groups = grouped(page.items, by)
    start = offset(request)
    part = groups[start : start + _PER_PAGE]
    opened = request.query_params.getlist("open")
    shown = tuple(row for group in part if group.key in opened for row in group.rows)
    rows = tuple(row for group in part for row in group.rows)
    return part, Page(rows, len(groups), start, _PER_PAGE, page.damaged), shown


def _has_value(rows: Sequence[RunRow], column: str) -> bool:
    always = ("name", "state", "settings", "accuracy", "reward")
    return column in always or any(value_of(row, column) is not None for row in rows)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _beyond_name(row: RunRow, names: Sequence[str]) -> dict[str, Any]:
    """Returns the settings to show; the settings of a point are its name, unless it has another."""
    settings = shown_settings(row, names)
    return settings if row.labels.name else {k: settings[k] for k in settings if k not in row.point}


def _as_texts(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names without sections, where they are unambiguous, and values."""
    short = {name: name.rpartition(".")[2] for name in settings}
    uses = Counter(short.values())
    return [
        (short[name] if uses[short[name]] == 1 else name, str(value))
        for name, value in settings.items()
    ]


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


def overview_content(request: Request, run: Execution) -> dict[str, Any]:
    """Returns command, cost, errors and outputs."""
    nodes = history_of(request).nodes(run.id)
    return {
        "live_now": run_status(history_of(request), run),
        "command": shlex.join(run.command),
        "cost": total_cost([node.cost for node in nodes if node.state != "cached"]),
        "products": [node for node in nodes if node.kind == "task" and node.summary][-40:],
        "unfinished": [
            node for node in nodes if node.kind == "task" and node.state in ("failed", "stopped")
        ][:40],
    }


overview = _view("overview")(overview_content)
"""Shows command, code, cost, errors, inputs and outputs."""


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
    return curves.content(request, run)


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
