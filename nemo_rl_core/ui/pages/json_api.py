"""Runs as JSON for programs; docs/json-api.md lists all addresses."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_json import page_record, run_record
from nemo_rl_core.ui.pages.parameters import day, history_of, offset, parameter

_MOST = 1000
_TEXTS = ("state", "workflow", "text", "tag", "sort")


def runs(request: Request) -> Response:
    """Returns the runs that the address asks for, as `nemo-rl runs --json` does."""
    texts = {
        name: parameter(request, name) for name in ("state", "workflow", "text", "tag", "sort")
    }
    query = RunQuery(
        **texts,
        since=day(request, "since"),
        where=request.query_params.getlist("where"),
        limit=min(offset(request, "limit") or 50, _MOST),
        offset=offset(request),
    )
    try:
        return _json(page_record(run_rows(history_of(request), query)))
    except ConfigError as error:
        return _json({"error": str(error)}, 400)


def run(request: Request) -> Response:
    """Returns a run with its nodes, as `nemo-rl runs RUN --json` does."""
    history = history_of(request)
    return _json(run_record(history, run_row(history, request.path_params["execution"])))


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(redacted(json.dumps(value)), status, media_type="application/json")
