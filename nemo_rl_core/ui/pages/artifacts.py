"""Pages of an artifact: results and manifest, files, and ancestry."""

from itertools import islice
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from nemo_rl_core.errors import UnsafePathError
from nemo_rl_core.history.records import AncestryGraph
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.ui import ancestry, graph
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.pages.parameters import history_of
from nemo_rl_core.ui.pages.recorded import artifact_of, render_artifact
from nemo_rl_core.ui.results import results_of

_DESCENDANTS_SHOWN, _FILES_SHOWN = 200, 500
_MAX_FILES_COUNTED = 20_000
_AS_TEXT = {".json", ".jsonl", ".md", ".txt", ".yaml", ".yml", ".jinja", ".html", ".py", ".csv"}


def manifest(request: Request) -> Response:
    """Shows results, manifest, parents, descendants and files of an artifact."""
    history = history_of(request)
    one = artifact_of(request)
    up, down = history.ancestry(one.id), history.descendants(one.id)
    files = _files(Path(one.path))
    descendants = [each for each in down.artifacts if each.depth]
    parents = [
        {"id": each.parent, "role": each.role} for each in up.parentage if each.child == one.id
    ]
    return render_artifact(
        request,
        one,
        "manifest",
        manifest=one.manifest,
        exists=Path(one.path).is_dir(),
        cost=total_cost([one.manifest.get("cost") or {}]),
        results=results_of(one.id, Path(one.path)),
        parents=parents,
        roles={each["role"]: each["id"] for each in parents},
        descendants=descendants[:_DESCENDANTS_SHOWN],
        num_descendants=len(descendants),
        files=files[:_FILES_SHOWN],
        num_files=len(files),
        total_bytes=sum(length for _, length in files),
    )


def ancestry_view(request: Request) -> Response:
    """Shows all ancestors of an artifact and the config changes between them."""
    one = artifact_of(request)
    ancestors: AncestryGraph = history_of(request).ancestry(one.id)
    return render_artifact(
        request,
        one,
        "ancestry",
        graph=graph.ancestry_graph(ancestors),
        rows=ancestry.rows(ancestors),
        steps=ancestry.changes(ancestors),
    )


def file(request: Request) -> Response:
    """Shows a file of an artifact if it is text, else sends it as a download."""
    root = Path(artifact_of(request).path)
    try:
        path = resolve_below(root, request.path_params["path"], source="the address")
    except UnsafePathError as error:
        raise HTTPException(404, "The artifact has no such file.") from error
    if not path.is_file():
        raise HTTPException(404, "The artifact has no such file.")
    if path.suffix in _AS_TEXT:
        return FileResponse(path, media_type="text/plain; charset=utf-8")
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


def _files(folder: Path) -> list[tuple[str, int]]:
    files = []
    for path in islice(sorted(folder.rglob("*")), _MAX_FILES_COUNTED):
        if path.is_file() and not path.is_symlink():
            files.append((str(path.relative_to(folder)), path.stat().st_size))
    return files
