"""Rows in many chunks equal rows in one chunk: content, files, splits and messages."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from nemo_rl_core.config.data import FileData, HubData, MixtureData
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data import chunks
from nemo_rl_core.data.chunks import ChunkedRows
from nemo_rl_core.data.datasets import hub, load_parts
from nemo_rl_core.data.datasets.files import read_records
from nemo_rl_core.data.loader import load_frame, load_prompts, load_records, save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.schemas import check_disjoint
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

TOKENIZER = build_arithmetic_tokenizer()


def _conversation(number: int) -> list[Row]:
    turns = [("user", f"{number}+1="), ("assistant", str(number + 1))]
    return [{"role": role, "content": text} for role, text in turns]


SHAPES: dict[str, Callable[[int], Row]] = {
    "prompts": lambda n: {"prompt": f"{n}+1=", "answer": str(n + 1)},
    "numbers": lambda n: {"prompt": f"{n}+1=", "answer": n + 1, "id": n, "level": n % 3},
    "completions": lambda n: {
        "prompt": f"{n}+1=",
        "answer": "" if n % 2 else "7",
        "completion": "7",
    },
    "nested": lambda n: {"prompt": f"{n}+1=", "answer": "7", "extra": {"index": n}, "task": "t"},
    "metadata": lambda n: {
        "prompt": f"{n}+1=",
        "answer": "7",
        "metadata": json.dumps({"n": n}),
    },
    "turns": lambda n: {"prompt": json.dumps(_conversation(n)[:1]), "answer": str(n + 1)},
    "only prompts": lambda n: {"prompt": f"{n}+1="},
    "text": lambda n: {"text": f"{n}+1={n + 1}"},
    "gsm8k": lambda n: {"question": f"{n}+1=", "answer": f"one more\n#### {n + 1}"},
    "open math": lambda n: {
        "problem": f"{n}+1=",
        "generated_solution": f"{n}+1",
        "expected_answer": str(n + 1),
        "problem_source": "x" if n % 2 else None,
    },
    "verl": lambda n: {
        "prompt": _conversation(n)[:1],
        "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
    },
    "messages": lambda n: {"messages": _conversation(n)},
    "pairs": lambda n: {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n), "margin": n},
}
"""Functions that make a row from a number."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the maximum number of rows of a chunk."""
    return lambda num_rows: monkeypatch.setattr(chunks, "MAX_ROWS", num_rows)


def _jsonl(rows: Sequence[Row], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(rows: Sequence[Row], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=5)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", ["list", "jsonl", "parquet", "dataset"])
def test_rows_in_many_chunks_equal_rows_in_one(
    tmp_path: Path, small_chunks: Callable[[int], None], shape: str, source: str
) -> None:
    rows = [SHAPES[shape](number) for number in range(17)]
    data_source: Any = {
        "list": lambda: rows,
        "jsonl": lambda: _jsonl(rows, tmp_path / "rows.jsonl"),
        "parquet": lambda: _parquet(rows, tmp_path / "rows.parquet"),
        "dataset": lambda: Dataset.from_list(rows),
    }[source]()

    def read(folder: str) -> list[Any]:
        data = DataModule.of(data_source, tokenizer=TOKENIZER, validation_fraction=0.2)
        contents = []
        for name in ("train", "validation"):
            path = save_frame(getattr(data, name), tmp_path / folder / name)
            contents += [getattr(data, name), pq.read_table(path).to_pylist()]
            contents.append(list(load_records(path.parent)))
        return [*contents, data.read_as]

    single = read("single")
    small_chunks(3)
    parts = read("parts")
    for one, other in zip(single, parts, strict=True):
        if isinstance(one, pd.DataFrame):
            pd.testing.assert_frame_equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("shape", ["prompts", "text", "messages", "pairs"])
def test_dropped_and_truncated_rows_are_the_same_in_chunks(
    tmp_path: Path, small_chunks: Callable[[int], None], shape: str
) -> None:
    rows = [SHAPES[shape](number % 7 if number < 14 else number * 999) for number in range(17)]
    path = _parquet(rows, tmp_path / "rows.parquet")
    policies: list[dict[str, Any]] = [
        {"duplicates": "drop", "overlong": "truncate", "max_sequence_tokens": 10},
        {"duplicates": "drop", "overlong": "drop", "max_sequence_tokens": 12},
        {"duplicates": "keep"},
    ]
    for policy in policies:
        frames = []
        for num_rows in (100, 4):
            small_chunks(num_rows)
            data = DataModule.of(path, tokenizer=TOKENIZER, policy=RowPolicy(**policy))
            frames.append((data.train, data.validation))
        for one, other in zip(*frames, strict=True):
            pd.testing.assert_frame_equal(one, other)


FAULTS: dict[str, dict[int, Row]] = {
    "empty prompts": {2: {"prompt": " "}, 8: {"prompt": ""}, 16: {"prompt": None}},
    "one chunk without answers": {n: {"answer": ""} for n in (4, 5, 6, 7)},
    "a prompt twice": {9: {"prompt": "2+1="}, 16: {"prompt": "2+1="}},
    "an id twice": {3: {"id": "x"}, 12: {"id": "x"}},
    "unknown characters": {1: {"prompt": "x"}, 11: {"prompt": "y"}},
    "not text": {10: {"answer": ["1", "2"]}},
    "half a character": {10: {"answer": "\ud800"}},
    "several columns": {2: {"answer": " "}, 9: {"prompt": "", "task": None}, 12: {"answer": None}},
    "turns": {13: {"prompt": json.dumps(_conversation(1))}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_many_chunks_have_the_same_message_as_in_one(
    small_chunks: Callable[[int], None], fault: str
) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": "1"} for number in range(17)]
    for number, changes in FAULTS[fault].items():
        rows[number] |= changes
    messages = []
    for num_rows in (100, 4):
        small_chunks(num_rows)
        with pytest.raises(DataError) as caught:
            DataModule.of(rows, tokenizer=TOKENIZER)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_rows_that_do_not_fit_their_format_are_counted_over_all_chunks(
    small_chunks: Callable[[int], None],
) -> None:
    rows = [{"prompt": f"{n}", "responses": ["1", "2"], "scores": [1, 2]} for n in range(17)]
    for number in (3, 7, 15):
        rows[number]["scores"] = []
    small_chunks(4)
    with pytest.raises(DataError, match=r"row 3 needs one score .* 2 more do not fit: rows 7, 15"):
        DataModule.of(rows)
    answers = [{"question": f"{n}", "answer": "#### 1" if n < 9 else "one"} for n in range(17)]
    with pytest.raises(DataError, match=r"8 of 17 rows have no answer .*\n.*\n.*row 9 "):
        DataModule.of(answers)
    seen: list[Row] = [{"prompt": f"{n}", "answer": "1", "images": []} for n in range(17)]
    seen[6]["images"] = seen[16]["images"] = ["x"]
    with pytest.raises(DataError, match=r"2 rows have images, .*\n.*\n.*first in row 6 "):
        DataModule.of(seen)


def test_margins_of_other_types_in_later_chunks_are_numbers(
    small_chunks: Callable[[int], None],
) -> None:
    small_chunks(3)
    rows = [
        {"prompt": f"{n}", "chosen": "1", "rejected": "2", "margin": 1.5 if n < 3 else True}
        for n in range(9)
    ]
    assert set(DataModule.of(rows).train["margin"]) == {1.0, 1.5}


def test_shared_prompts_are_found_in_any_chunk(small_chunks: Callable[[int], None]) -> None:
    small_chunks(3)
    train = [{"prompt": str(number)} for number in range(20)]
    validation = [{"prompt": str(number)} for number in (30, 31, 32, 19, 33)]
    with pytest.raises(DataError, match=r"1 of 5 validation .*\n.*\n.*rows 3; the first is '19'"):
        check_disjoint(train, validation)
    check_disjoint(train[:19], validation)


def test_many_rows_are_stored_on_disk_and_read_by_index(
    tmp_path: Path, small_chunks: Callable[[int], None]
) -> None:
    rows = [SHAPES["prompts"](number) for number in range(17)]
    path = _jsonl(rows, tmp_path / "rows.jsonl")
    small_chunks(4)
    records = read_records(path)
    assert isinstance(records, ChunkedRows)
    assert (records[0], records[-1], records[3:9:2]) == (rows[0], rows[16], rows[3:9:2])
    assert records == rows
    with pytest.raises(IndexError):
        records[17]
    data = DataModule.of(path)
    save_frame(data.train, tmp_path)
    prompts = load_prompts(tmp_path, TOKENIZER)
    assert not isinstance(prompts, list)
    small_chunks(100)
    assert list(prompts) == load_prompts(tmp_path, TOKENIZER) == prompts[:]
    damaged = load_frame(tmp_path)
    damaged.loc[[5, 12], "id"] = "0"
    damaged.loc[9, "prompt"] = ""
    with pytest.raises(DataError) as single:
        save_frame(damaged, tmp_path / "a")
    small_chunks(4)
    with pytest.raises(DataError) as parts:
        save_frame(damaged, tmp_path / "a")
    assert sorted(str(single.value).splitlines()) == sorted(str(parts.value).splitlines())


def test_rows_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    rows = [SHAPES["prompts"](number) for number in range(6)]
    path = _jsonl(rows, tmp_path / "rows.jsonl")
    with path.open("a") as file:
        file.write("no JSON\n")
    data = DataModule.of(path, validation=rows[5:], max_rows=5)
    assert list(data.train["prompt"]) == [row["prompt"] for row in rows[:5]]
    shards = tmp_path / "shards"
    shards.mkdir()
    _parquet(rows[:4], shards / "part-0.parquet")
    (shards / "part-1.parquet").write_bytes(b"no parquet")
    assert len(DataModule.of(shards, max_rows=4, validation_fraction=0.3).train) == 3
    config = FileData(train=str(shards), max_rows=3, validation_fraction=0.4)
    parts = load_parts(config, seed=0)
    assert len(parts.train) + len(parts.validation or []) == 3
    for source in (rows, Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        assert len(DataModule.of(source, validation=rows[5:], max_rows=5).train) == 5


def test_only_the_splits_in_use_are_opened(tmp_path: Path) -> None:
    rows = [SHAPES["prompts"](number) for number in range(8)]
    for name, part in (("train", rows[:6]), ("validation", rows[6:])):
        _parquet(part, tmp_path / f"{name}-00000-of-00001.parquet")
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"no parquet")
    data = DataModule.of(tmp_path)
    assert (len(data.train), len(data.validation)) == (6, 2)
    # `datasets` reads the folder like a repository of the hub.
    assert {*hub.fetch(str(tmp_path), subset=None, revision=None)} == {"train", "validation"}
    parts = load_parts(HubData(name=str(tmp_path), validation="validation"), seed=0)
    assert (len(parts.train), len(parts.validation or [])) == (6, 2)
    validation = hub.read_validation(HubData(name=str(tmp_path), validation="validation"))
    assert [row["prompt"] for row in validation.rows] == ["6+1=", "7+1="]
    with pytest.raises(DataError, match=r"no split 'dev'\n.*one of train, validation, test"):
        load_parts(HubData(name=str(tmp_path), validation="dev"), seed=0)
    saved = tmp_path / "saved"
    DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows)).save_to_disk(saved)
    for file in (saved / "test").glob("*.arrow"):
        file.write_bytes(b"no arrow")
    assert len(DataModule.of(saved, validation_fraction=0.3).train) == 6


def test_a_mixture_of_stored_rows_equals_one_of_lists(
    tmp_path: Path, small_chunks: Callable[[int], None]
) -> None:
    for name, shape in (("a", "prompts"), ("b", "gsm8k"), ("c", "turns")):
        rows = [SHAPES[shape](number) for number in range(20)]
        _parquet(rows, tmp_path / f"{name}.parquet")
    sources = [
        {"weight": weight, "data": {"kind": "file", "train": str(tmp_path / f"{name}.parquet")}}
        for name, weight in (("a", 3), ("b", 1), ("c", 1))
    ]
    config = MixtureData.model_validate(
        {"kind": "mixture", "sources": sources, "num_train": 60, "duplicates": "keep"}
    )
    lists = load_parts(config, seed=3)
    small_chunks(4)
    parts = load_parts(config, seed=3)
    assert isinstance(parts.train, ChunkedRows)
    assert (parts.train, parts.validation) == (lists.train, lists.validation)


MEASURE = """
import resource, sys, time
import pyarrow as pa, pyarrow.parquet as pq
from nemo_rl_core.data.module import DataModule

def measured(num_rows):
    schema = pa.schema([("prompt", "string"), ("answer", "string")])
    with pq.ParquetWriter(sys.argv[1], schema) as file:
        for start in range(0, num_rows, 50_000):
            numbers = range(start, start + 50_000)
            prompts = [f"What is {number} + 1?" for number in numbers]
            file.write_table(pa.table({"prompt": prompts, "answer": list(map(str, numbers))}))
    started = time.process_time()
    data = DataModule.of(sys.argv[1])
    seconds = time.process_time() - started
    assert len(data.train) + len(data.validation) == num_rows
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

_, before = measured(100_000)
seconds, after = measured(400_000)
started = time.process_time()
for batch in pq.ParquetFile(sys.argv[1]).iter_batches():
    batch.to_pylist()
print((time.process_time() - started) / seconds, after - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "rows.parquet")]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    share, growth_mib = map(float, printed.split())
    # As lists of rows, this took 40 times as long as reading the file, and 1 GiB per million rows.
    assert share > 0.07
    assert growth_mib < 75
