"""A page of all that a model came from: an artifact a row, its parents as links to theirs."""

from collections.abc import Mapping, Sequence
from html import escape

_SHORT = 8
"""Characters of a content hash that name an artifact here and in commands."""

_STYLE = """<style>
.lineage { font: 14px/1.4 system-ui, sans-serif; max-width: 75em }
.lineage table { border-collapse: collapse }
.lineage th, .lineage td { border-bottom: 1px solid #ccc; padding: 4px 12px 4px 0; text-align: left;
  vertical-align: top }
.lineage :target td { background: #fff3c4; color: #1f2328 }
</style>"""


def lineage_html(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns the page.

    What an artifact does not have, such as the seed of an export, is an empty cell. Markup in names
    is escaped.

    Args:
        rows: The model, then its ancestors by generation. Each has `generation`, `stage` and
            `content` (a hash, or why there is none), and may have `parents` (hashes, with commas)
            and other columns, which are shown as they come.
    """
    model = str(rows[0]["content"])[:_SHORT]
    there = {str(row["content"])[:_SHORT] for row in rows}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(_line(row, columns, there) for row in rows)
    stage = escape(str(rows[0]["stage"]))
    return (
        f'{_STYLE}<div class="lineage"><h2>What {stage} {escape(model)} came from</h2>'
        "<p>A row is an artifact, and a parent is a link to its row. "
        f"<code>nemo-rl lineage {escape(model)}</code> shows in what the configs differ, "
        "<code>nemo-rl ui</code> the same as a graph.</p>"
        f"<table><tr>{head}</tr>{body}</table></div>"
    )


def _line(row: Mapping[str, object], columns: Sequence[str], there: set[str]) -> str:
    cells = "".join(f"<td>{_cell(column, row.get(column), there)}</td>" for column in columns)
    return f'<tr id="{escape(str(row["content"])[:_SHORT])}">{cells}</tr>'


def _cell(column: str, value: object, there: set[str]) -> str:
    if value is None:
        return ""
    if column != "parents":
        return escape(str(value))
    names = dict.fromkeys(str(value).split(", ") if value else ())
    return ", ".join(
        f'<a href="#{escape(name)}">{escape(name)}</a>' if name in there else escape(name)
        for name in names
    )
