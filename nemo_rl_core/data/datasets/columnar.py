"""Rows made of columns of text at once, as `formats` makes them one by one.

A table that holds anything but text and whole numbers, or a text that may be a conversation, gives
None: its rows are made one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.columnwise import is_text, may_hold_turns
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RowMetadata:
    """The metadata of rows.

    Attributes:
        columns: That go into it.
        of: Its JSON text, of a row.
    """

    columns: Sequence[str]
    of: Callable[[Row], Any]


def prompt_table(
    understood: "pa.Table", source: "pa.Table", *, first: int, task: str, metadata: RowMetadata
) -> "pa.Table | None":
    """Prompts of the columns `prompt`, and `answer` or `completion` or both.

    Args:
        understood: The columns that are understood.
        source: Columns with `id`, `task` and `metadata`, where there are such, and the others.
        first: The number of the first record.
        task: The task of rows without one.
        metadata: What goes into `metadata`.

    Returns:
        A table of the columns of prompts, or None.
    """
    names = [name for name in ("prompt", "answer", "completion") if name in understood.column_names]
    texts = {name: _text(understood, name) for name in names}
    if "prompt" not in texts or len(texts) < 2 or any(text is None for text in texts.values()):
        return None
    if any(may_hold_turns(texts[name]) for name in names if name != "answer"):
        return None
    answer = texts.get("answer", texts.get("completion"))
    completion = texts.get("completion", answer)
    filled = {"answer": _or(answer, completion), "completion": _or(completion, answer)}
    return _with_common(source, {"prompt": texts["prompt"], **filled}, first, task, metadata)


def lone_prompt_table(
    understood: "pa.Table", source: "pa.Table", *, first: int, task: str, metadata: RowMetadata
) -> "pa.Table | None":
    """Prompts of the column `prompt` alone; see `prompt_table`."""
    prompt = _text(understood, "prompt")
    if prompt is None or may_hold_turns(prompt):
        return None
    empty = _constant("", len(source))
    columns = {"prompt": prompt, "answer": empty, "completion": empty}
    return _with_common(source, columns, first, task, metadata)


def text_table(
    source: "pa.Table", *, first: int, task: str, metadata: RowMetadata
) -> "pa.Table | None":
    """Texts of the column `text`; see `prompt_table`."""
    names = source.column_names
    if "text" not in names or "max_tokens" in names or not is_text(source.column("text").type):
        return None
    return _with_common(source, {"text": _text(source, "text")}, first, task, metadata)


def renamed(table: "pa.Table", names: Mapping[str, str]) -> "pa.Table":
    """Columns by other names.

    Args:
        table: The columns.
        names: The name of a column, by its new name; those that the table lacks are left out.
    """
    found = {target: source for target, source in names.items() if source in table.column_names}
    return table.select([*found.values()]).rename_columns([*found])


def _with_common(
    table: "pa.Table", columns: Mapping[str, Any], first: int, task: str, metadata: RowMetadata
) -> "pa.Table | None":
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.cast(pa.array(range(first, first + len(table))), pa.large_string())
    common = {"id": numbers, "task": _constant(task, len(table))}
    for name, default in common.items():
        if name in table.column_names:
            given = _text(table, name)
            if given is None:
                return None
            common[name] = _or(given, default)
    texts = _metadata(table, metadata)
    if texts is None:
        return None
    return pa.table({"id": common["id"], **columns, "task": common["task"], "metadata": texts})


def _metadata(table: "pa.Table", metadata: RowMetadata) -> Any:
    import pyarrow as pa

    names = ("metadata", *metadata.columns)
    wanted = [name for name in names if name in table.column_names]
    if not wanted:
        return _constant("{}", len(table))
    rows: list[Row] = table.select(wanted).to_pylist()
    try:
        return pa.array([metadata.of(row) for row in rows], pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # not text: a check of rows names them
        return None


def _text(table: "pa.Table", name: str) -> Any:
    """A column as text, whole numbers written out; None where it is absent or of another type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in table.column_names:
        return None
    column = table.column(name)
    kind = column.type
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
        return pc.cast(column, pa.large_string())
    return None


def _or(column: Any, default: Any) -> Any:
    """The texts of a column, and those of another where they are null or empty."""
    import pyarrow.compute as pc

    if column is default:
        return column
    if not column.null_count and not pc.any(pc.equal(column, "")).as_py():
        return column
    is_empty = pc.fill_null(pc.equal(column, ""), True)
    return pc.if_else(is_empty, default, column)


def _constant(value: str, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, pa.large_string()), count)
