"""Stage: a page and a record of a model's ancestry."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.ancestry import ancestry_of
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.manifest import Manifest
from tasks.artifacts import Checkpoint, Lineage, LineageReport
from tasks.pods.resources import PLAIN
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


class LineageTaskConfig(FrozenConfig):
    """Config of `lineage_report`, which reads nothing but its model."""


@cached_task(PLAIN)
def lineage_report(model: Checkpoint) -> Lineage:
    """Follows the model's parents back to data, code and config."""

    def work(folder: Path) -> StageResult:
        ancestors = ancestry_of(model.records)
        rows = [_row(0, model.manifest)]
        rows += [
            _row(a.depth, a.manifest)
            if a.manifest
            else {"generation": a.depth, "stage": a.ref.stage, "content": a.state}
            for a in ancestors
        ]
        write_atomic(folder / "lineage.json", json.dumps(rows, indent=1, sort_keys=True))
        summary = f"{model.manifest.stage} and the {len(ancestors)} artifacts that it came from"
        return StageResult("lineage", "json", summary, deck=lineage_html(rows))

    fields = make(
        __name__, "lineage_report", config=LineageTaskConfig(), parents={"model": model}, work=work
    )
    return LineageReport(**fields)


def _row(depth: int, manifest: Manifest) -> dict[str, object]:
    return {
        "generation": depth,
        "stage": manifest.stage,
        "kind": manifest.kind,
        "content": manifest.content_hash[:16],
        "step": manifest.step or None,  # data and evaluations have none
        "seed": manifest.seed,
        "config": manifest.config_hash[:12],
        "source": manifest.source_digest,
        "parents": ", ".join(parent.content_hash[:8] for parent in manifest.parents),
    }


_SHORT = 8
"""Number of characters of a content hash in the page and in commands."""

_STYLE = """<style>
.lineage { font: 14px/1.4 system-ui, sans-serif; max-width: 75em }
.lineage table { border-collapse: collapse }
.lineage th, .lineage td { border-bottom: 1px solid #ccc; padding: 4px 12px 4px 0; text-align: left;
  vertical-align: top }
.lineage :target td { background: #fff3c4; color: #1f2328 }
</style>"""


def lineage_html(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns the page for a model and its ancestors, by generation.

    Args:
        rows: Each has `generation`, `stage` and `content` (a hash, or why there is none), and may
            have `parents` (hashes separated by commas) and other columns, shown unchanged.
    """
    model = str(rows[0]["content"])[:_SHORT]
    listed = {str(row["content"])[:_SHORT] for row in rows}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(_line(row, columns, listed) for row in rows)
    stage = escape(str(rows[0]["stage"]))
    return (
        f'{_STYLE}<div class="lineage"><h2>What {stage} {escape(model)} came from</h2>'
        "<p>Each row is an artifact; its parents are links to their rows. "
        f"<code>nemo-rl lineage {escape(model)}</code> shows the differences of the configs, "
        "<code>nemo-rl ui</code> shows the same as a graph.</p>"
        f"<table><tr>{head}</tr>{body}</table></div>"
    )


def _line(row: Mapping[str, object], columns: Sequence[str], listed: set[str]) -> str:
    cells = "".join(f"<td>{_cell(column, row.get(column), listed)}</td>" for column in columns)
    return f'<tr id="{escape(str(row["content"])[:_SHORT])}">{cells}</tr>'


def _cell(column: str, value: object, listed: set[str]) -> str:
    if value is None:
        return ""
    if column != "parents":
        return escape(str(value))
    names = dict.fromkeys(str(value).split(", ") if value else ())
    return ", ".join(
        f'<a href="#{escape(name)}">{escape(name)}</a>' if name in listed else escape(name)
        for name in names
    )
