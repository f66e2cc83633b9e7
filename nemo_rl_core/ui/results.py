"""Results of an artifact, which its page shows first: figures, verdict, rows or card."""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import UnsafePathError
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.ui import completions
from nemo_rl_core.ui.completions import Card, Filter, Source
from nemo_rl_core.ui.text import visible

_ROWS_SHOWN, _WRONG_SHOWN, _MAX_BYTES = 10, 5, 1_000_000
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A measured value; `low` and `high` bound its confidence interval, if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether the interval can be drawn on a scale from 0 to 1."""
        bounds = (self.low, self.value, self.high)
        return all(bound is not None and 0 <= bound <= 1 for bound in bounds)


@dataclass(frozen=True)
class Length:
    """Lengths in characters of a column's texts."""

    column: str
    shortest: int
    median: int
    long: int
    longest: int


@dataclass(frozen=True)
class Results:
    """Contents of an artifact; parts that it lacks are empty.

    Attributes:
        summary: The sentence that its stage printed.
        categories: Figures by category, if there are several.
        wrong: The first wrong greedy completions of an evaluation.
        decision: Fields of a promotion or comparison.
        rows: The first rows of a data set.
        card: The card of an exported model as HTML.
    """

    summary: str = ""
    figures: list[Figure] = field(default_factory=list)
    categories: dict[str, list[Figure]] = field(default_factory=dict)
    wrong: list[Card] = field(default_factory=list)
    decision: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0
    lengths: list[Length] = field(default_factory=list)
    card: Markup | None = None
    card_facts: str = ""


def brief_results(folder: Path) -> Results:
    """Reads summary, figures and decision of an artifact."""
    return Results(
        summary=_text(folder, "summary.txt"),
        figures=_figures(_json(folder, "metrics.json")),
        decision=_decision(folder),
    )


def results_of(artifact: str, folder: Path) -> Results:
    """Reads the results of an artifact; files that are missing or damaged are left out."""
    brief = brief_results(folder)
    if brief.figures:
        categories = _json(folder, "categories.json")
        shown = categories if len(categories) > 1 else {}
        return replace(
            brief,
            categories={name: _figures(each) for name, each in shown.items()},
            wrong=_wrong(artifact, folder),
        )
    table = folder / "rows.parquet"
    modified = table.stat().st_mtime if table.is_file() else 0.0
    rows, num_rows, lengths = _rows(table, modified)
    facts, card = _card(_text(folder, "model/README.md"))
    return replace(
        brief, rows=rows, num_rows=num_rows, lengths=lengths, card=card, card_facts=facts
    )


def _decision(folder: Path) -> dict[str, Any]:
    decision = _json(folder, "decision.json") or _json(folder, "comparison.json")
    numbers = ("before", "after", "difference", "low", "high", "p_value", "detectable")
    counts = ("gained", "lost", "num_prompts")
    is_complete = all(isinstance(decision.get(name), int | float) for name in (*numbers, *counts))
    return decision if is_complete else {}


def _figures(metrics: object) -> list[Figure]:
    """Joins each value with its bounds; counts come last."""
    if not isinstance(metrics, Mapping):
        return []
    numbers = {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    bounds = {f"{name}_{end}" for name in numbers for end in ("low", "high")}
    figures = [
        Figure(name, value, numbers.get(f"{name}_low"), numbers.get(f"{name}_high"))
        for name, value in numbers.items()
        if name not in bounds
    ]
    return sorted(figures, key=lambda each: each.low is None)


def _wrong(artifact: str, folder: Path) -> list[Card]:
    """Returns the first wrong completions."""
    path = completions.file_of(folder, None)
    try:
        if path is None or not completions.has_completions(folder):
            return []
        selection = completions.select(Source(artifact, path), Filter(only="wrong", mode="greedy"))
        return selection.cards(0, _WRONG_SHOWN)
    except OSError:
        return []


@functools.lru_cache(maxsize=256)
def _rows(path: Path, _modified: float) -> tuple[list[dict[str, Any]], int, list[Length]]:
    """Returns the first rows of a data set, how many there are, and the lengths of its texts."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            first = next(file.iter_batches(_ROWS_SHOWN), None)
            rows = first.to_pylist() if first is not None else []
            numbers: dict[str, list[Any]] = {
                name: []
                for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)
                if pa.types.is_string(kind) and name in _TEXT_COLUMNS
            }
            for batch in file.iter_batches(columns=[*numbers]) if numbers else ():
                for name, chunks in numbers.items():
                    chunks.append(pc.utf8_length(batch[name]))
            lengths = []
            for name, chunks in numbers.items():
                every = pa.chunked_array(chunks, pa.int32())
                quantiles = pc.quantile(every, [0, 0.5, 0.9, 1], interpolation="nearest")
                if None not in (values := quantiles.to_pylist()):
                    lengths.append(Length(name, *map(int, values)))
            return rows, file.metadata.num_rows, lengths
    except (OSError, pa.ArrowException):
        return [], 0, []


_TEXT_COLUMNS = ("prompt", "completion", "answer", "chosen", "rejected", "text")


def _card(text: str) -> tuple[str, Markup | None]:
    """Returns the facts at the top of a card, and the card as HTML without the card's markup."""
    if not text:
        return "", None
    from markdown_it import MarkdownIt

    front = _FRONT_MATTER.match(text)
    body = visible(redacted(text[front.end() :] if front else text))
    # Markup in the card is shown as text; markdown-it refuses links to scripts, files and data.
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = markdown.parse(body)
    for token in tokens:
        token.attrs.pop("style", None)  # alignment of columns, which the page's policy refuses
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1:]) + 2)}"
        if token.type in ("fence", "code_block", "table_open"):  # they may scroll
            token.attrs["tabindex"] = "0"
    html = markdown.renderer.render(tokens, markdown.options, {})
    # A table whose first row is empty has no header.
    return front[1] if front else "", Markup(html.replace("<th></th>", "<td></td>"))


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(_text(folder, name) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(folder: Path, name: str) -> str:
    try:
        path = resolve_below(folder, name, source="a result")
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return ""
        return path.read_text(errors="backslashreplace")
    except (OSError, UnsafePathError):
        return ""
