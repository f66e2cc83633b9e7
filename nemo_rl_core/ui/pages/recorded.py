"""Lookup and rendering that all pages of an artifact share."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.errors import NotRecordedError
from nemo_rl_core.history.ancestry import in_store
from nemo_rl_core.history.records import ArtifactRow
from nemo_rl_core.ui import completions
from nemo_rl_core.ui.pages.parameters import history_of
from nemo_rl_core.ui.templating import render


def artifact_of(request: Request) -> ArtifactRow:
    """Returns the artifact in the path of the request."""
    history = history_of(request)
    artifact_id = request.path_params["artifact"]
    try:
        return history.artifact(artifact_id)
    except NotRecordedError:
        row = in_store(history.store, artifact_id)  # older than the history
        if row is None or row.id != artifact_id:
            raise
        return row


def render_artifact(request: Request, one: ArtifactRow, tab: str, **context: Any) -> Response:
    """Renders a view of an artifact."""
    maker = None
    if one.made_by is not None:
        maker = history_of(request).node(one.made_by).node
    return render(
        request,
        f"artifact_{tab}.html",
        tab=tab,
        artifact=one,
        maker=maker,
        readable_rows=completions.has_completions(Path(one.path)),
        **context,
    )
