"""Published data sets: how one row of each is converted, and how refused rows can be used.

`published_shapes.jsonl` has a row in its original format and the columns of the converted row, with
conversations as lines of `role: text`. For a refused row, `refused` is a part of the message, and
`options` are those that the message suggests and that give the expected row.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets.files import read_records
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.turns import turns_of
from nemo_rl_core.errors import DataError

_TABLE = Path(__file__).with_name("published_shapes.jsonl")
SHAPES: list[dict[str, Any]] = [json.loads(line) for line in _TABLE.read_text().splitlines()]


def _written(column: str, value: Any) -> Any:
    if column == "metadata":
        return json.loads(value)
    turns = turns_of(value)
    return value if turns is None else "\n".join(f"{t['role']}: {t['content']}" for t in turns)


def _assert_becomes(records: Any, expected: dict[str, Any], options: dict[str, Any]) -> None:
    (row,) = recognize(records, where="here", task="t", form=RowFormat.of(options)).rows
    assert {column: _written(column, row[column]) for column in expected} == expected


@pytest.mark.parametrize("is_file", [False, True], ids=["rows", "parquet"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape["name"]))
def test_published_rows_are_converted_as_intended(
    shape: dict[str, Any], is_file: bool, tmp_path: Path
) -> None:
    records: Any = [shape["row"]]
    if is_file:
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
        records = read_records(tmp_path / "rows.parquet")
    expected, options = shape.get("expected", {}), shape.get("options", {})
    if "refused" in shape:
        with pytest.raises(DataError) as caught:
            recognize(records, where="here", task="t")
        assert shape["refused"] in str(caught.value)
    if expected:
        _assert_becomes(records, expected, options)
