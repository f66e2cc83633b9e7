"""The page of completions: of a step, of all steps of a run, or of one or two evaluations."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Page
from nemo_rl_core.ui import completions, curves
from nemo_rl_core.ui.charts import Chart
from nemo_rl_core.ui.completions import Card, Filter, Source
from nemo_rl_core.ui.pages.parameters import (
    history_of,
    number_parameter,
    offset,
    parameter,
    scan_seconds,
)
from nemo_rl_core.ui.pages.recorded import artifact_of, render_artifact
from nemo_rl_core.ui.reading import part_names, readings
from nemo_rl_core.ui.tokens import LEGENDS, MAX_TOKENS, TINTS, tokens

_PROMPTS_PER_PAGE = 10
_CHOICES = ("low", "high", "only", "mode", "order", "text", "prompt", "tint", "against")
_ALL = "all"


def completions_view(request: Request) -> Response:
    """Shows completions by prompt, filtered."""
    one = artifact_of(request)
    folder = Path(one.path)
    numbers = completions.steps(folder)
    step_text = parameter(request, "step")
    step: int | str | None = None
    if numbers:
        is_step = _is_index(step_text) and int(step_text) in numbers
        step = _ALL if step_text == _ALL else int(step_text) if is_step else numbers[-1]
    path = completions.file_of(folder, step if isinstance(step, int) else None)
    if step != _ALL and (path is None or not completions.has_completions(folder)):
        raise HTTPException(404, "This artifact has no completions, or its folder is gone.")
    chosen = {name: parameter(request, name) for name in _CHOICES}
    other = _other(request, one, chosen["against"])
    row_filter, refused = _filter(request, chosen)
    if chosen["only"] in completions.CHANGES:
        if other is None or path is None:
            refused = "Gained and lost need another evaluation to compare with."
        else:
            changed = completions.changes(Path(other.path) / "rows.parquet", path)
            row_filter = replace(row_filter, prompts=changed[chosen["only"]])
    if step == _ALL:
        shown = _scanned(request, _of_run(history_of(request), one), row_filter)
    else:
        assert path is not None
        at = step if isinstance(step, int) else None
        shown = _selected(request, Source(one.id, path, at), row_filter)
    cards: Sequence[Card] = shown["cards"]
    return render_artifact(
        request,
        one,
        "completions",
        numbers=numbers,
        step=step,
        chosen=chosen,
        refused=refused,
        overview=_reward_chart(request, one) if not any(chosen.values()) else None,
        readings=readings(
            cards, names=part_names(one.manifest.get("config", {})), others=_rows_of(other, cards)
        ),
        tokens=_tokens(cards, folder, chosen["tint"]),
        tints=TINTS,
        legends=LEGENDS,
        max_tokens=MAX_TOKENS,
        other=other,
        evaluations=_evaluations(request, one) if step is None else [],
        is_single=row_filter.row is not None,
        **{name: value for name, value in shown.items() if name != "cards"},
    )


def _filter(request: Request, chosen: dict[str, str]) -> tuple[Filter, str]:
    """Returns the filter of a request, and why a reward was refused."""
    numbers: dict[str, float | None] = {"low": None, "high": None}
    refused = ""
    try:
        numbers = {name: number_parameter(request, name) for name in numbers}
    except ValueError:
        refused = "Rewards are numbers, such as 0.5. They were not filtered."
    row, group = (parameter(request, name) for name in ("row", "group"))
    row_filter = Filter(
        numbers["low"],
        numbers["high"],
        chosen["text"],
        chosen["only"],
        chosen["order"],
        chosen["prompt"],
        group=int(group) if _is_index(group) else None,
        row=int(row) if _is_index(row) else None,
        mode=chosen["mode"],
    )
    return row_filter, refused


def _is_index(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 12


def _selected(request: Request, source: Source, row_filter: Filter) -> dict[str, Any]:
    """Returns a page of the cards of one file."""
    selection = completions.select(source, row_filter)
    start = offset(request)
    cards = selection.cards(
        start, start + _PROMPTS_PER_PAGE, tokens=bool(parameter(request, "tint"))
    )
    return {
        "cards": cards,
        "page": Page(tuple(cards), selection.num_prompts, start, _PROMPTS_PER_PAGE),
        "num_passing": len(selection.passing),
        "num_rows": len(selection.codes),
        "searched": None,
    }


def _scanned(request: Request, files: Sequence[Source], row_filter: Filter) -> dict[str, Any]:
    """Returns the cards of the next files of a run that have some."""
    start = offset(request)
    scan = completions.scan(
        files[start:],
        row_filter,
        limit=_PROMPTS_PER_PAGE,
        skip=offset(request, "skip"),
        seconds=scan_seconds(request),
    )
    end = start + scan.num_searched
    searched = files[start : end + bool(scan.num_shown)]
    return {
        "cards": scan.cards,
        "page": Page(tuple(scan.cards), len(scan.cards), 0, len(scan.cards) or 1),
        "num_passing": scan.num_passing,
        "num_rows": scan.num_rows,
        "searched": {
            "first": searched[-1].step if searched else None,
            "last": searched[0].step if searched else None,
            "num_files": len(files),
            "num_damaged": scan.num_damaged,
            "next": end if end < len(files) else None,
            "skip": scan.num_shown,
        },
    }


def _of_run(history: History, one: ArtifactRow) -> list[Source]:
    """Returns the steps of a run with the same stage and sweep point, the latest first."""
    artifacts = [one]
    if one.made_by is not None:
        execution = history.node(one.made_by).node.execution
        points = history.points_of(execution)
        artifacts = [
            each
            for each in history.artifacts_of(execution)
            if each.stage.split()[:1] == one.stage.split()[:1]
            and points.get(each.id) == points.get(one.id)
        ]
    files = [file for each in artifacts for file in completions.sources(each.id, Path(each.path))]
    return sorted(files, key=lambda file: file.step or 0, reverse=True)


def _other(request: Request, one: ArtifactRow, artifact: str) -> ArtifactRow | None:
    """Returns the evaluation to compare an evaluation with; None if it has no completions."""
    history = history_of(request)
    if not artifact or not history.has_artifact(artifact):
        return None
    other = history.artifact(artifact)
    are_evaluations = one.kind == other.kind == "evaluation"
    return other if are_evaluations and completions.has_completions(Path(other.path)) else None


def _evaluations(request: Request, one: ArtifactRow) -> list[ArtifactRow]:
    """Returns the other evaluations of the same run."""
    if one.made_by is None:
        return []
    history = history_of(request)
    every = history.artifacts_of(history.node(one.made_by).node.execution)
    return [each for each in every if each.kind == one.kind and each.id != one.id]


def _rows_of(other: ArtifactRow | None, cards: Sequence[Card]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of another evaluation for the prompts of some cards."""
    if other is None or not cards:
        return {}
    prompts = frozenset(str(card.rows[0]["prompt_id"]) for card in cards)
    source = Source(other.id, Path(other.path) / "rows.parquet")
    selection = completions.select(source, Filter(prompts=prompts))
    others = selection.cards(0, len(prompts))
    return {str(card.rows[0]["prompt_id"]): card.rows for card in others}


def _tokens(cards: Sequence[Card], folder: Path, tint: str) -> dict[int, Any]:
    """Returns the tokens of a single completion by its row."""
    if tint not in TINTS or len(cards) != 1:
        return {}
    row = cards[0].rows[0]
    return {row["index"]: tokens(row, folder, tint)}


def _reward_chart(request: Request, one: ArtifactRow) -> Chart | None:
    if one.made_by is None:
        return None
    history = history_of(request)
    node = history.node(one.made_by).node
    charts = curves.charts(curves.series(history, [node], ["reward"]))
    return charts[0] if charts else None
