"""Pages of an artifact: manifest, files, ancestry and completions."""

from itertools import islice
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from nemo_rl_core.errors import NotRecordedError, StoreError, UnsafePathError
from nemo_rl_core.history.ancestry import in_store
from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, Page
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.ui import ancestry, completions, curves, graph
from nemo_rl_core.ui.charts import Chart
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.pages.parameters import history_of, number_parameter, offset, parameter
from nemo_rl_core.ui.templating import render, render_message

_DESCENDANTS_SHOWN, _FILES_SHOWN, _READ_PER_PAGE = 200, 500, 20
_MAX_FILES_COUNTED = 20_000
_AS_TEXT = {".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".jinja", ".html", ".py", ".csv"}


def find(request: Request) -> Response:
    """Redirects from an id, the beginning of a hash, or a path to the artifact's page."""
    query = parameter(request, "q")
    if not query:
        return RedirectResponse("/", status_code=303)
    try:
        artifact = history_of(request).find_artifact(query)
    except StoreError as error:
        several = (error.got or "").split(", ") if error.expected else []
        text = error.problem if not several else "Several artifacts begin like this:"
        return render_message(
            request,
            f"Artifact {query[:200]}",
            text,
            status=200 if several else 404,
            facts=[] if several else [("Fix", error.fix or "")],
            matches=several,
        )
    return RedirectResponse(f"/artifacts/{artifact.id}", status_code=303)


def manifest(request: Request) -> Response:
    """Shows manifest, parents, descendants and files of an artifact."""
    history = history_of(request)
    one = _artifact(request)
    up, down = history.ancestry(one.id), history.descendants(one.id)
    files = _files(Path(one.path))
    descendants = [each for each in down.artifacts if each.depth]
    return _render(
        request,
        one,
        "manifest",
        manifest=one.manifest,
        exists=Path(one.path).is_dir(),
        cost=total_cost([one.manifest.get("cost") or {}]),
        parents=[
            {"id": each.parent, "role": each.role} for each in up.parentage if each.child == one.id
        ],
        descendants=descendants[:_DESCENDANTS_SHOWN],
        num_descendants=len(descendants),
        files=files[:_FILES_SHOWN],
        num_files=len(files),
        total_bytes=sum(length for _, length in files),
    )


def ancestry_view(request: Request) -> Response:
    """Shows all ancestors of an artifact and the config changes between them."""
    one = _artifact(request)
    ancestors: AncestryGraph = history_of(request).ancestry(one.id)
    return _render(
        request,
        one,
        "ancestry",
        graph=graph.ancestry_graph(ancestors),
        rows=ancestry.rows(ancestors),
        steps=ancestry.changes(ancestors),
    )


def completions_view(request: Request) -> Response:
    """Shows filtered completions of a training step or of an evaluation."""
    one = _artifact(request)
    folder = Path(one.path)
    numbers = completions.steps(folder)
    step_text = parameter(request, "step")
    step = (
        (int(step_text) if step_text.isdecimal() and int(step_text) in numbers else numbers[-1])
        if numbers
        else None
    )
    path = completions.file_of(folder, step)
    if path is None:
        raise HTTPException(404, "This artifact has no completions, or its folder is gone.")
    chosen = {name: parameter(request, name) for name in ("low", "high", "only", "order", "text")}
    refused = ""
    row_filter = completions.Filter()
    try:
        row_filter = completions.Filter(
            number_parameter(request, "low"),
            number_parameter(request, "high"),
            chosen["text"],
            chosen["only"],
            chosen["order"],
        )
    except ValueError:
        refused = "Rewards are numbers, such as 0.5. Nothing was filtered."
    rows, total = completions.read(path, row_filter)
    start = offset(request)
    return _render(
        request,
        one,
        "completions",
        numbers=numbers,
        step=step,
        chosen=chosen,
        refused=refused,
        overview=_reward_chart(request, one),
        page=Page(tuple(rows[start : start + _READ_PER_PAGE]), len(rows), start, _READ_PER_PAGE),
        num_rows=total,
    )


def file(request: Request) -> Response:
    """Shows a file of an artifact if it is text, else sends it as a download."""
    root = Path(_artifact(request).path)
    try:
        path = resolve_below(root, request.path_params["path"], source="the address")
    except UnsafePathError as error:
        raise HTTPException(404, "The artifact has no such file.") from error
    if not path.is_file():
        raise HTTPException(404, "The artifact has no such file.")
    if path.suffix in _AS_TEXT:
        return FileResponse(path, media_type="text/plain; charset=utf-8")
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


def _artifact(request: Request) -> ArtifactRow:
    history = history_of(request)
    artifact_id = request.path_params["artifact"]
    try:
        return history.artifact(artifact_id)
    except NotRecordedError:
        row = in_store(history.store, artifact_id)  # older than the history
        if row is None or row.id != artifact_id:
            raise
        return row


def _render(request: Request, one: ArtifactRow, tab: str, **context: Any) -> Response:
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


def _files(folder: Path) -> list[tuple[str, int]]:
    files = []
    for path in islice(sorted(folder.rglob("*")), _MAX_FILES_COUNTED):
        if path.is_file() and not path.is_symlink():
            files.append((str(path.relative_to(folder)), path.stat().st_size))
    return files


def _reward_chart(request: Request, one: ArtifactRow) -> Chart | None:
    if one.made_by is None:
        return None
    history = history_of(request)
    node = history.node(one.made_by).node
    charts = curves.charts(curves.series(history, [node], ["reward"]))
    return charts[0] if charts else None
