"""The search over runs, names, settings, artifacts, metrics and texts of completions."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nemo_rl_core.errors import NotRecordedError, StoreError
from nemo_rl_core.history.differences import flat
from nemo_rl_core.history.labels import read_labels, rows_with
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution
from nemo_rl_core.history.search import artifacts_like, latest_artifacts, metrics_like
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.ui import completions
from nemo_rl_core.ui.completions import Filter
from nemo_rl_core.ui.pages.parameters import history_of, offset, parameter, scan_seconds
from nemo_rl_core.ui.templating import render, render_message

_SHOWN, _SETTINGS_SHOWN, _ARTIFACTS_SEARCHED, _RUNS_SEARCHED = 10, 4, 300, 500
_MAX_LENGTH, _MIN_TEXT_LENGTH, _MIN_ID_LENGTH = 200, 3, 8
_AROUND = 90


@dataclass(frozen=True)
class _Hit:
    """A line of the answer: a link, and what it matches."""

    address: str
    label: str
    note: str = ""
    lines: list[str] = field(default_factory=list)


def find(request: Request) -> Response:
    """Redirects to the only match of an id, hash, path or name, else lists all matches."""
    query = parameter(request, "q")
    if not query:
        return RedirectResponse("/", status_code=303)
    history = history_of(request)
    exact = _exact(history, query)
    if exact is not None:
        return RedirectResponse(exact, status_code=303)
    sections: dict[str, list[_Hit]] = {}
    searched = None
    if query.isprintable() and len(query) <= _MAX_LENGTH:
        start, skip = offset(request), offset(request, "skip")
        if not start and not skip:
            sections = _sections(history, query)
        sections["Completions"], searched = _completions(
            history, query, start, skip, scan_seconds(request)
        )
    sections = {name: hits for name, hits in sections.items() if hits}
    if not sections and (searched is None or searched["next"] is None):
        return render_message(
            request,
            f"Nothing matches {query[:200]}",
            "Ids, hashes, paths, names, settings, metrics and texts of completions were searched.",
            status=404,
            facts=[("Fix", "Search for a shorter part of it.")],
        )
    return render(request, "find.html", query=query, sections=sections, searched=searched)


def _exact(history: History, query: str) -> str | None:
    """Returns the page of the only run, name or artifact that a query can mean."""
    with suppress(NotRecordedError):
        return f"/executions/{quote(history.execution(query).id, safe='')}"
    if query in _names(history):
        return f"/models#{query}"
    if len(rows := rows_with(history.store, name=query)) == 1:
        return _address(rows[0])
    runs = history.executions(text=query, limit=2) if len(query) >= _MIN_ID_LENGTH else None
    if runs is not None and runs.total == 1 and runs.items and runs.items[0].id.startswith(query):
        return f"/executions/{quote(runs.items[0].id, safe='')}"
    with suppress(StoreError):
        return f"/artifacts/{quote(history.find_artifact(query).id, safe='')}"
    return None


def _names(history: History) -> list[str]:
    try:
        return Aliases(history.store).names()
    except (OSError, StoreError):
        return []  # names in an object store that cannot be reached


def _sections(history: History, query: str) -> dict[str, list[_Hit]]:
    labels = read_labels(history.store)
    labeled = rows_with(history.store, text=query)[:_SHOWN]
    part = query.partition("=")[0].strip().rpartition(".")[2]
    runs = history.executions(text=query, limit=_SHOWN).items
    if part and part != query:  # a setting: the recorded inputs do not have its dotted path
        candidates = history.executions(text=part, limit=_RUNS_SEARCHED).items
        having = (run for run in candidates if run not in runs and any(_matching(run, query)))
        runs = (*runs, *islice(having, _SHOWN))
    return {
        "Names": [
            _Hit(f"/models#{name}", name) for name in _names(history) if query.lower() in name
        ],
        "Runs": [
            *(
                _Hit(_address(row), row, f"{labels[row].name} {labels[row].note}")
                for row in labeled
            ),
            *(_run_hit(run, query) for run in runs if run.id not in labeled),
        ],
        "Artifacts": [
            _Hit(f"/artifacts/{quote(one.id, safe='')}", one.id, f"{one.stage}, {one.kind}")
            for one in artifacts_like(history, query, limit=_SHOWN)
        ],
        "Metrics": [
            _Hit(f"/executions/{quote(run, safe='')}/curves?{urlencode({'metric': name})}", name)
            for name, run in metrics_like(history, query, limit=_SHOWN).items()
        ],
    }


def _address(row: str) -> str:
    """Returns the page of a run, or of a point as in `RUN:12`."""
    run, _, node = row.partition(":")
    return f"/nodes/{node}" if node else f"/executions/{quote(run, safe='')}"


def _run_hit(run: Execution, query: str) -> _Hit:
    note = f"{run.workflow.rpartition('.')[2]}, {run.recipe or 'no recipe'}, {run.state}"
    settings = islice(_matching(run, query), _SETTINGS_SHOWN)
    return _Hit(_address(run.id), run.id, note, list(settings))


def _matching(run: Execution, query: str) -> Iterator[str]:
    """Yields the settings that contain a text, such as part of `grpo.learning_rate=0.1`."""
    text = re.sub(r"\s*=\s*", " = ", query.lower())
    settings = (f"{path} = {value}" for path, value in flat(run.inputs).items())
    return (setting for setting in settings if text in setting.lower())


def _completions(
    history: History, query: str, start: int, skip: int, seconds: float
) -> tuple[list[_Hit], dict[str, int | None] | None]:
    """Searches the texts of the latest artifacts, and says how far the search has come."""
    if len(query) < _MIN_TEXT_LENGTH:
        return [], None
    artifacts = latest_artifacts(history, "checkpoint", "evaluation", limit=_ARTIFACTS_SEARCHED)
    files = [file for one in artifacts for file in completions.sources(one.id, Path(one.path))]
    readable = [file for file in files if file.step is not None or _has_texts(file.path)]
    scan = completions.scan(
        readable[start:], Filter(text=query), limit=_SHOWN, skip=skip, seconds=seconds
    )
    hits = []
    for card in scan.cards:
        row, source = card.rows[0], card.source
        step = {} if source.step is None else {"step": source.step}
        where = "evaluation" if source.step is None else f"step {source.step}"
        texts = [str(row[name] or "") for name in ("completion", "prompt")]
        hits.append(
            _Hit(
                f"/artifacts/{quote(source.artifact, safe='')}/completions?"
                + urlencode({**step, "text": query}),
                f"{where} of {source.artifact}",
                f"prompt {row['prompt_id']}",
                [_snippet(text, query) for text in texts if query.lower() in text.lower()][:1],
            )
        )
    end = start + scan.num_searched
    return hits, {
        "num_rows": scan.num_rows,
        "next": end if end < len(readable) else None,
        "skip": scan.num_shown,
        "num_files": len(readable),
        "end": end,
        "num_damaged": scan.num_damaged,
    }


def _has_texts(path: Path) -> bool:
    return completions.has_completions(path.parent)


def _snippet(text: str, query: str) -> str:
    at = text.lower().find(query.lower())
    begin, end = max(0, at - _AROUND), at + len(query) + _AROUND
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
