"""Proofs that rows are valid by whole columns of text; where one fails, rows are looked at."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from nemo_rl_core.data.frame_checks import is_json_object
from nemo_rl_core.data.frames import RowKind

if TYPE_CHECKING:
    import pyarrow as pa

_CONVERSATION = r"^[^!-~]*\["
"""What a text begins with that may be the JSON of turns: no visible ASCII before a bracket."""

_VISIBLE = "[!-~]"


def is_valid(table: "pa.Table", kind: RowKind) -> bool:
    """Whether every row has what the schema of its kind asks, and no turns to look at.

    Ids are not compared. False says nothing: prompts of several turns, conversations and pairs are
    checked row by row.

    Args:
        table: The columns of the kind, in any order.
        kind: Of the rows.
    """
    needed = {"prompts": {"prompt", "answer", "completion"}, "text": {"text"}}.get(kind)
    names = {"id", "task", "metadata"}
    if needed is None or {*table.column_names} != needed | names:
        return False
    if any(not is_text(column.type) or column.null_count for column in table.columns):
        return False
    asked = table.column("text" if kind == "text" else "prompt")
    if not _has_texts(asked) or (kind == "prompts" and may_hold_turns(asked)):
        return False
    rest = [table.column(name) for name in needed - {"text", "prompt"}]
    if not all(_is_empty(column) or _has_texts(column) for column in rest):
        return False
    # Most rows have the same metadata: none.
    distinct = table.column("metadata").unique().to_pylist()
    return all(map(is_json_object, distinct))


def is_text(kind: "pa.DataType") -> bool:
    """Whether a type is text."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def may_hold_turns(column: Any) -> bool:
    """Whether a text of a column may be the JSON of turns."""
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring_regex(column, _CONVERSATION)).as_py())


def _has_texts(column: Any) -> bool:
    """Whether every text has more than white space."""
    import pyarrow.compute as pc

    is_visible = pc.match_substring_regex(column, _VISIBLE)
    if pc.all(is_visible).as_py():
        return True
    others: list[str] = column.filter(pc.invert(is_visible)).to_pylist()
    return all(text.strip() for text in others)


def _is_empty(column: Any) -> bool:
    import pyarrow.compute as pc

    return bool(pc.all(pc.equal(column, "")).as_py())


def has_value(found: "pd.DataFrame | pa.Table", name: str) -> bool:
    """Whether a column has a value that is not empty, in any row."""
    if isinstance(found, pd.DataFrame):
        return bool(found[name].any())
    return not _is_empty(found.column(name))


def columns_with_text(table: "pa.Table") -> set[str]:
    """The columns of text that have a value."""
    return {
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if is_text(column.type) and column.null_count < len(column)
    }


def as_large_text(table: "pa.Table") -> "pa.Table":
    """A table of text with the type that pandas gives text."""
    import pyarrow as pa

    return table.cast(pa.schema([(name, pa.large_string()) for name in table.column_names]))
