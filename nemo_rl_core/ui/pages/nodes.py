"""Pages of a node and its deck."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node
from nemo_rl_core.ui import curves, logs, machine_load
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.guard import DECK_POLICY
from nemo_rl_core.ui.pages.parameters import history_of, node_of
from nemo_rl_core.ui.templating import render

_INNER_SHOWN = 100
_MAX_DECK_BYTES = 20_000_000
_DECK_HEAD = b"""<!doctype html><meta charset="utf-8"><style>
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f1c; }
@media (prefers-color-scheme: dark) { :root { --ground: #1b1f1d; --ink: #e8ebe8; } }
body { margin: 12px; font: 14px/1.5 system-ui, sans-serif; }
body { background: var(--ground); color: var(--ink); }
svg text { fill: currentColor; }
table { display: block; overflow-x: auto; }
</style>
"""
"""Styles of the page's theme, before the deck's."""


def node(request: Request) -> Response:
    """Shows attempts, inputs, outputs, cache state, curves, deck and log of a node."""
    history = history_of(request)
    detail = node_of(request)
    one = detail.node
    run = history.execution(one.execution)
    siblings = history.nodes(one.execution)
    by_id = {other.id: other for other in siblings}
    inner = [other for other in siblings if other.parent == one.id]
    measured = history.metric_names(one.id)
    names = curves.ordered(measured)
    shown = names[: curves.SHOWN]
    return render(
        request,
        "node.html",
        live=one.state == "running",
        section="executions",
        node=one,
        detail=detail,
        maker=detail.maker,
        above=_callers(one, by_id),
        inner=inner[:_INNER_SHOWN],
        num_inner=len(inner),
        cost=total_cost([other.cost for other in siblings if _is_within(other, one, by_id)]),
        charts=curves.charts(curves.series(history, [one], shown)),
        more=len(names) - len(shown),
        machine=machine_load.charts(history, [one], {one.id: measured}),
        has_deck=_deck_of(history, request, one) is not None,
        part=None
        if one.log_from is None
        else logs.newest(Path(run.log_path), begin=one.log_from, end=one.log_to),
    )


def deck(request: Request) -> Response:
    """Serves the deck of a node for a frame without scripts, network or origin."""
    history = history_of(request)
    path = _deck_of(history, request, node_of(request).node)
    if path is None or path.stat().st_size > _MAX_DECK_BYTES:
        raise HTTPException(404, "This node has no deck, or it is too large to be shown.")
    return Response(
        _DECK_HEAD + path.read_bytes(),
        media_type="text/html; charset=utf-8",
        headers={"content-security-policy": DECK_POLICY},
    )


def _deck_of(history: History, request: Request, one: Node) -> Path | None:
    """Returns the deck's file; for a cache hit, that of the node that ran.

    Only files in the store and in imported artifacts are served.
    """
    maker = one if one.deck_path or one.cached_from is None else history.node(one.cached_from).node
    if not maker.deck_path:
        return None
    artifacts = [value.artifact for value in history.node(maker.id).outputs if value.artifact]
    folders = [
        Path(history.artifact(each).path) for each in artifacts if history.has_artifact(each)
    ]
    path = Path(maker.deck_path).resolve()
    roots = (request.app.state.source.store.root, *folders)
    is_allowed = any(path.is_relative_to(folder) for folder in roots)
    return path if is_allowed and path.is_file() else None


def _is_within(other: Node, one: Node, by_id: dict[int, Node]) -> bool:
    return other.state != "cached" and (other == one or one in _callers(other, by_id))


def _callers(one: Node, by_id: dict[int, Node]) -> list[Node]:
    callers: list[Node] = []
    while one.parent in by_id and len(callers) < len(by_id):
        one = by_id[one.parent]
        callers.append(one)
    return callers[::-1]
