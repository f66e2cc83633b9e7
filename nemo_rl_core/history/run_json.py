"""Runs as values for JSON, as `nemo-rl runs --json` prints them and the page answers."""

from dataclasses import asdict
from typing import Any

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Page
from nemo_rl_core.history.run_columns import RunRow, record_of


def page_record(page: Page[RunRow]) -> dict[str, Any]:
    """Returns a list of runs with their settings and results."""
    items = [{**_record(row), "settings": dict(row.settings)} for row in page.items]
    counts = {"total": page.total, "offset": page.offset, "limit": page.limit}
    return {"items": items, **counts, "damaged": page.damaged}


def run_record(history: History, row: RunRow) -> dict[str, Any]:
    """Returns a run or a point of a sweep with its nodes."""
    nodes = [asdict(node) for node in history.nodes(row.run) if row.has(node.point)]
    return {**asdict(history.execution(row.run)), **_record(row), "nodes": nodes}


def _record(row: RunRow) -> dict[str, Any]:
    return {k: "nan" if repr(v) == "nan" else v for k, v in record_of(row).items()}
