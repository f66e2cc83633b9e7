"""Values from memory and from Arrow keep their type, and padding is left out."""

import datetime
import json
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_core.data import chunks
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.data.json_values import plain_row
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.errors import DataError

CITY = {"city": "Rome", "tags": [{"id": 1}]}
SUM = {"expression": "2+2", "tags": [{"sku": "z"}]}


def metadata_of(rows: Any, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(row["metadata"]) for row in read(rows, seed=0, **options).train]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.bool_(False), False),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float32(0.5), 0.5),
        (np.str_("a"), "a"),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([{"a": np.array([1]), "b": None}], dtype=object), [{"a": [1]}]),
        (np.datetime64("2024-05-01"), "2024-05-01"),
        (torch.tensor(1), 1),
        (torch.tensor([True]), [True]),
        (pd.Series([1, 2]), [1, 2]),
        (pd.NA, None),
        (pd.NaT, None),
        (float("nan"), None),
        (np.float64("nan"), None),
        ((1, (2,)), [1, [2]]),
        ({"a": {"b": np.int64(1), "c": None}}, {"a": {"b": 1, "c": None}}),
        ({"a": np.array([1]), "b": None}, {"a": [1]}),  # as pandas reads a struct
        ({np.int64(1): 2, "z": 1}, {"1": 2, "z": 1}),
    ],
)
def test_values_from_memory_have_the_types_of_json(value: Any, expected: Any) -> None:
    plain = plain_row({"x": value})["x"]
    assert plain == expected
    assert json.dumps(plain) == json.dumps(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (datetime.datetime(2024, 5, 1, 12), "2024-05-01 12:00:00"),
        (pd.Timestamp("2024-05-01 12:00"), "2024-05-01 12:00:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("2.50"), 2.5),
        (Decimal("3"), 3),
    ],
)
def test_dates_and_decimals_reach_rewards(value: Any, expected: Any) -> None:
    (metadata,) = metadata_of([{"prompt": "1+1=", "answer": "2", "x": value}])
    assert metadata == {"x": expected}


def test_decimals_are_answers_as_they_are_written(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["5/2="], "answer": [Decimal("2.50")]})
    pq.write_table(table, tmp_path / "rows.parquet")
    for source in (tmp_path / "rows.parquet", table.to_pylist()):
        assert read(source, seed=0).train[0]["answer"] == "2.50"


@pytest.mark.parametrize("value", [b"\x89PNG", {1, 2}, {"bytes": b"\x89"}, object()])
def test_a_value_without_a_json_form_is_refused_with_its_column(value: Any) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "x": value}]
    with pytest.raises(DataError, match=r"row 0 has .* column 'x' \(data.drop_columns: \[x\]"):
        read(rows, seed=0)


def test_a_column_of_bytes_is_refused_from_a_file_too(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["1+1="], "answer": ["2"], "x": [b"\x89"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="column 'x'"):
        read(tmp_path / "rows.parquet", seed=0)


def test_a_frame_is_read_as_its_file_is(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "prompt": [
                [{"role": "user", "content": "1+1="}],
                [{"role": "user", "content": "2+1="}],
            ],
            "answer": ["2", "3"],
            "is_hard": [False, True],
            "level": [1.0, None],
            "extra": [{"options": ["a"], "setup": None}, {"options": ["b"], "setup": "x = 1"}],
        }
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    records = pd.read_parquet(tmp_path / "rows.parquet").to_dict("records")
    assert isinstance(records[0]["prompt"], np.ndarray)
    from_memory = read(records, seed=0).train
    assert json.loads(from_memory[0]["metadata"]) == {
        "is_hard": False,
        "level": 1.0,
        "extra": {"options": ["a"]},
    }
    from_file = read(tmp_path / "rows.parquet", seed=0).train
    assert [{**row, "task": ""} for row in from_memory] == [
        {**row, "task": ""} for row in from_file
    ]


@pytest.mark.parametrize("form", ["numpy", "torch", None])
def test_a_dataset_keeps_types_in_every_format(form: str | None) -> None:
    data = datasets.Dataset.from_list(
        [
            {"prompt": f"{n}+1=", "answer": str(n + 1), "label": n, "extra": extra}
            for n, extra in enumerate([{"a": 1}, {"b": [True]}])
        ]
    ).with_format(form)
    assert metadata_of(data) == [
        {"label": 0, "extra": {"a": 1}},
        {"label": 1, "extra": {"b": [True]}},
    ]


def saved_forms(folder: Path, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the same rows in every source that uses Arrow."""
    table = pa.Table.from_pylist(list(rows))
    pq.write_table(table, folder / "rows.parquet")
    arrow = str(folder / "rows.arrow")
    with pa.OSFile(arrow, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    data = datasets.Dataset.from_list(list(rows))
    data.save_to_disk(folder / "saved")
    forms = [folder / name for name in ("rows.parquet", "rows.arrow", "saved")]
    return [*forms, data, data.to_iterable_dataset(), data.with_format("numpy")]


@pytest.mark.parametrize("max_rows", [chunks.MAX_ROWS, 1])
def test_arrow_padding_does_not_reach_rewards(
    tmp_path: Path, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MAX_ROWS", max_rows)
    rows = [
        {"prompt": f"{n}?", "answer": "4", "call": call, "metadata": {"own": call}}
        for n, call in enumerate([CITY, SUM])
    ]
    expected = [{"call": call, "own": call} for call in (CITY, SUM)]
    for source in saved_forms(tmp_path, rows):
        assert metadata_of(source) == expected, source


def test_arrow_padding_does_not_reach_models(tmp_path: Path) -> None:
    def turns(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]

    rows = [{"messages": turns(each)} for each in (CITY, SUM)]
    for source in saved_forms(tmp_path, rows):
        rows_read = [json.loads(row["messages"]) for row in read(source, seed=0).train]
        assert rows_read == [turns(CITY), turns(SUM)], source


def test_nulls_of_the_user_stay_without_arrow(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"city": "Rome", "expression": None}}
    row = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    as_text = datasets.Dataset.from_list(
        [
            {
                "messages": [
                    {**row["messages"][0], "tool_calls": None},
                    {"role": "assistant", "tool_calls": json.dumps([call])},
                ]
            }
        ]
    )
    for source in (path, [row], as_text):
        (stored,) = read(source, seed=0).train
        (kept,) = json.loads(stored["messages"])[1]["tool_calls"]
        assert kept["function"]["arguments"] == {"city": "Rome", "expression": None}


def test_unit_tests_of_a_parquet_file_can_be_run(tmp_path: Path) -> None:
    exchange = {"stdin": "1\n", "stdout": "2\n"}
    rows = [
        {"prompt": "one", "metadata": {"tests": ["assert f() == 1"]}},
        {"prompt": "two", "metadata": {"tests": ["assert math.pi"], "setup": "import math"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pieces.parquet")
    unit_tests = [
        UnitTests.of(row["metadata"]) for row in read(tmp_path / "pieces.parquet", seed=0).train
    ]
    assert [tests.setup for tests in unit_tests] == ["", "import math"]
    rows = [
        {"prompt": "one", "tests": [exchange]},
        {"prompt": "two", "tests": [{**exchange, "note": "n"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "exchanges.parquet")
    first = read(tmp_path / "exchanges.parquet", seed=0).train[0]
    assert len(UnitTests.of(first["metadata"]).exchanges) == 1
