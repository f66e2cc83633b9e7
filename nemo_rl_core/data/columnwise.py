"""Vectorized checks of text columns; rows that they do not prove valid are checked one by one."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from nemo_rl_core.data.frames import RowKind
from nemo_rl_core.data.record_frames import is_json_object

if TYPE_CHECKING:
    import pyarrow as pa

_CONVERSATION = r"^[^!-~]*\["
"""Start of a text that may be the JSON of turns: no visible ASCII before the bracket."""

_VISIBLE = "[!-~]"


def is_valid(table: "pa.Table", kind: RowKind) -> bool:
    """Whether every row certainly matches the schema of its kind.

    Ids are not compared. False does not mean invalid: prompts of several turns, conversations and
    pairs need a check of each row.
    """
    needed = {"prompts": {"prompt", "answer", "completion"}, "text": {"text"}}.get(kind)
    names = {"id", "task", "metadata"}
    if needed is None or {*table.column_names} != needed | names:
        return False
    if any(not is_text(column.type) or column.null_count for column in table.columns):
        return False
    prompts = table.column("text" if kind == "text" else "prompt")
    if not _has_texts(prompts) or (kind == "prompts" and may_hold_turns(prompts)):
        return False
    other_columns = [table.column(name) for name in needed - {"text", "prompt"}]
    if not all(_is_empty(column) or _has_texts(column) for column in other_columns):
        return False
    # Most rows have the same, empty metadata.
    distinct = table.column("metadata").unique().to_pylist()
    return all(map(is_json_object, distinct))


def is_text(kind: "pa.DataType") -> bool:
    """Whether a type is a text type."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def may_hold_turns(column: Any) -> bool:
    """Whether any text of a column may be the JSON of turns."""
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring_regex(column, _CONVERSATION)).as_py())


def _has_texts(column: Any) -> bool:
    import pyarrow.compute as pc

    is_visible = pc.match_substring_regex(column, _VISIBLE)
    if pc.all(is_visible).as_py():
        return True
    others: list[str] = column.filter(pc.invert(is_visible)).to_pylist()
    return all(text.strip() for text in others)


def _is_empty(column: Any) -> bool:
    import pyarrow.compute as pc

    return bool(pc.all(pc.equal(column, "")).as_py())


def has_value(rows: "pd.DataFrame | pa.Table", name: str) -> bool:
    """Whether any row has a non-empty value in a column."""
    if isinstance(rows, pd.DataFrame):
        return bool(rows[name].any())
    return not _is_empty(rows.column(name))
