"""The application: routes, middleware and error pages."""

import threading
import time
from collections.abc import Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from nemo_rl_core.errors import ConfigError, NemoRLError, NotRecordedError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.guard import Guard
from nemo_rl_core.ui.pages import (
    artifacts,
    compare,
    completions,
    curves,
    events,
    executions,
    find,
    models,
    nodes,
    share,
)
from nemo_rl_core.ui.server import EVENTS
from nemo_rl_core.ui.templating import STATIC, render_message

_SWEEP_SECONDS = 5.0


class HistorySource:
    """Provides the history of a store; the file may appear, be replaced or vanish at any time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._history: History | None = None
        self._file: tuple[int, int] | None = None
        self._swept = 0.0

    def is_empty(self) -> bool:
        """True if the store has no recorded run."""
        return self._identity() is None

    def history(self) -> History:
        """Returns the current history."""
        with self._lock:
            file = self._identity()
            if self._history is None or file is None or file != self._file:
                # The earlier connection is not closed: another thread may be querying it.
                self._history = History(self.store)
                self._file, self._swept = self._identity(), time.monotonic()
            elif time.monotonic() - self._swept > _SWEEP_SECONDS:
                self._swept = time.monotonic()
                self._history.sweep()
            return self._history

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = path_of(self.store).stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino


def create_app(store: Store, *, hosts: Collection[str] = (), token: str = "") -> Starlette:
    """Builds the application that shows a store, at `localhost`, IP addresses and `hosts`."""
    app = Starlette(
        routes=[
            Route("/", executions.index),
            Route("/runs.json", executions.index),
            Route("/executions/{execution}.json", executions.as_json),
            Route("/executions/{execution}", executions.overview),
            Route("/executions/{execution}/graph", executions.graph_view),
            Route("/executions/{execution}/nodes", executions.nodes_view),
            Route("/executions/{execution}/timeline", executions.timeline),
            Route("/executions/{execution}/curves", executions.curves_view),
            Route("/executions/{execution}/curves.json", curves.data),
            Route("/executions/{execution}/curves.csv", curves.as_csv),
            Route(EVENTS, events.events),
            Route("/executions/{execution}/log", executions.log),
            Route("/executions/{execution}/share.html", share.run),
            Route("/nodes/{node:int}", nodes.node),
            Route("/nodes/{node:int}/deck", nodes.deck),
            Route("/find", find.find),
            Route("/models", models.models),
            Route("/artifacts/{artifact}", artifacts.manifest),
            Route("/artifacts/{artifact}/ancestry", artifacts.ancestry_view),
            Route("/artifacts/{artifact}/completions", completions.completions_view),
            Route("/artifacts/{artifact}/files/{path:path}", artifacts.file),
            Route("/compare", compare.compare),
            Route("/compare/share.html", share.comparison),
            Mount("/static", _Static(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, hosts=hosts, token=token)],
        exception_handlers={
            HTTPException: _not_found,
            NotRecordedError: _not_recorded,
            NemoRLError: _unreadable,
            OSError: _file_unreadable,
        },
    )
    app.state.source = HistorySource(store)
    app.state.num_streams = 0
    return app


class _Static(StaticFiles):
    """Static files, cached forever, since their URLs contain a digest of the content."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "private, max-age=31536000, immutable"
        return response


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail if error.detail != "Not Found" else "There is no page at this address."
    return render_message(request, "Not found", text, status=error.status_code)


def _not_recorded(request: Request, error: Exception) -> Response:
    assert isinstance(error, NemoRLError)
    return render_message(
        request,
        "Not found",
        f"{error.problem[0].upper()}{error.problem[1:]}.",
        status=404,
        facts=[("Fix", error.fix or "Look for it among all executions.")],
    )


def _unreadable(request: Request, error: Exception) -> Response:
    assert isinstance(error, NemoRLError)
    facts = (("Expected", error.expected), ("Found", error.got), ("Fix", error.fix))
    is_refused = isinstance(error, ConfigError)
    return render_message(
        request,
        "The request is refused" if is_refused else "The history cannot be shown",
        f"{error.problem[0].upper()}{error.problem[1:]}.",
        status=400 if is_refused else 503,
        facts=[(label, fact) for label, fact in facts if fact],
    )


def _file_unreadable(request: Request, error: Exception) -> Response:
    return render_message(
        request,
        "A file cannot be read",
        "It is damaged, or was removed during reading.",
        status=503,
        facts=[
            ("Found", str(error)),
            ("Fix", "Reload; if the problem persists, run `nemo-rl verify`."),
        ],
    )
