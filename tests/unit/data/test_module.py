"""Data from any source, read and checked by `DataModule`."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.data import FileData, HubData
from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.datasets.parts import held_out_mask
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError

TOKENIZER = build_arithmetic_tokenizer()


def sums(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(start, stop)]


def prompts(frame: Any) -> list[str]:
    return list(frame["prompt"])


TRAIN, HELD = sums(0, 6), sums(6, 8)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def _arrow(path: Path, rows: list[dict[str, Any]], new: Any) -> Path:
    table = pa.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def _sources(folder: Path) -> dict[str, Any]:
    """Returns the training rows in every kind of source."""
    pq.write_table(pa.Table.from_pylist(TRAIN), folder / "a.parquet")
    (folder / "a.csv").write_text(
        "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in TRAIN)
    )
    _jsonl(folder / "parts" / "a-0.jsonl", TRAIN[:4])
    _jsonl(folder / "parts" / "a-1.jsonl", TRAIN[4:])
    _dataset(TRAIN).save_to_disk(folder / "saved")
    return {
        "list": TRAIN,
        "dataset": _dataset(TRAIN),
        "splits": datasets.DatasetDict({"train": _dataset(TRAIN)}),
        "jsonl": str(_jsonl(folder / "a.jsonl", TRAIN)),
        "path": folder / "a.jsonl",
        "csv": folder / "a.csv",
        "parquet": folder / "a.parquet",
        "arrow stream": _arrow(folder / "a.arrow", TRAIN, pa.ipc.new_stream),
        "arrow file": _arrow(folder / "b.arrow", TRAIN, pa.ipc.new_file),
        "folder": folder / "parts",
        "saved": folder / "saved",
    }


def test_every_shape_gives_the_same_rows(tmp_path: Path) -> None:
    for shape, source in _sources(tmp_path).items():
        data = DataModule.of(source, validation=HELD, tokenizer=TOKENIZER, max_prompt_tokens=5)
        assert data.kind == "prompts"
        assert prompts(data.train) == [row["prompt"] for row in TRAIN], shape
        assert list(data.train["completion"]) == [row["answer"] for row in TRAIN], shape
        assert prompts(data.validation) == ["6+1=", "7+1="], shape


def test_named_splits_are_used(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        {"train": _dataset(TRAIN), "validation": _dataset(HELD), "test": _dataset(sums(8, 9))}
    )
    both.save_to_disk(tmp_path / "saved")
    _jsonl(tmp_path / "files" / "train-0-of-1.jsonl", TRAIN)
    _jsonl(tmp_path / "files" / "validation.jsonl", HELD)
    for source in (both, tmp_path / "saved", tmp_path / "files"):
        data = DataModule.of(source)
        assert prompts(data.train) == [row["prompt"] for row in TRAIN]
        assert prompts(data.validation) == ["6+1=", "7+1="]


def test_generated_sources_and_configs() -> None:
    data = DataModule.of(ArithmeticData(num_train=20, num_validation=5), tokenizer=TOKENIZER)
    assert (len(data.train), len(data.validation)) == (20, 5)
    # The limit of the config applies: 16 tokens by default, here 3.
    short = ArithmeticData(num_train=20, num_validation=5, max_prompt_tokens=3)
    with pytest.raises(DataError, match="more than 3 tokens"):
        DataModule.of(short, tokenizer=TOKENIZER)
    assert len(DataModule.of("arithmetic").train) == ArithmeticData().num_train
    sampled = DataModule.of("reasoning_gym:chain_sum")
    assert set(sampled.train["task"]) == {"chain_sum"}


def test_a_share_is_held_out_with_a_seed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = DataModule.of(sums(0, 40), validation_fraction=0.1, seed=3)
    # A tenth of 40
    assert (len(data.train), len(data.validation)) == (36, 4)
    assert "4 of 40 rows are held out for validation (seed 3)" in caplog.text
    assert "prompts with answers" in caplog.text
    same = DataModule.of(sums(0, 40), validation_fraction=0.1, seed=3)
    other = DataModule.of(sums(0, 40), validation_fraction=0.1, seed=4)
    assert prompts(same.validation) == prompts(data.validation) != prompts(other.validation)
    assert DataModule.of(data).train.equals(data.train)


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=30).filter(lambda keys: len(set(keys)) > 1),
    st.floats(0.01, 0.99),
    st.integers(0, 99),
)
def test_rows_of_one_prompt_stay_on_one_side(keys: list[int], fraction: float, seed: int) -> None:
    rows = [{"prompt": str(key), "chosen": str(n)} for n, key in enumerate(keys)]
    mask = held_out_mask(rows, fraction=fraction, seed=seed, where="rows")
    indices = np.flatnonzero(mask).tolist()
    selected = {keys[index] for index in indices}
    assert indices == [index for index, key in enumerate(keys) if key in selected]
    assert 0 < len(selected) < len(set(keys))


def test_overlap_and_mixed_kinds_are_refused() -> None:
    with pytest.raises(DataError, match="2 of 3 validation prompts") as caught:
        DataModule.of(sums(0, 5), validation=sums(3, 6))
    assert "rows 0, 1" in str(caught.value)
    with pytest.raises(DataError, match="different kinds"):
        DataModule.of(sums(0, 5), validation=[{"text": "abc"}])
    with pytest.raises(DataError, match="too few rows"):
        DataModule.of(sums(0, 1))
    with pytest.raises(DataError, match="the given data set is empty"):
        DataModule.of([])


def test_repeated_prompts_are_refused_with_the_way_to_keep_them() -> None:
    rows = [*sums(0, 6), *sums(0, 2)]
    with pytest.raises(DataError) as caught:
        DataModule.of(rows)
    assert "prompt occurs twice: rows 6, 7" in str(caught.value)
    assert "data.duplicates: drop or keep" in str(caught.value)
    for duplicates, left in (("keep", 8), ("drop", 6)):
        data = DataModule.of(rows, policy=RowPolicy.model_validate({"duplicates": duplicates}))
        assert len(data.train) + len(data.validation) == left
        # A trainer does the same, with the tokenizer and without a policy.
        again = DataModule.of(data, tokenizer=TOKENIZER)
        assert again.train.equals(data.train)


def test_rows_are_named_as_the_source_counts_them() -> None:
    with pytest.raises(DataError, match="prompt is empty: rows 17"):
        DataModule.of([*sums(0, 17), {"prompt": " ", "answer": "1"}, *sums(18, 30)])


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("./no/such.jsonl", "does not exist"),
        ("no_such.csv", "does not exist"),
        ("notes.txt", "unknown suffix"),
        (7, "data source is not recognized"),
        ([1, 2], "data source is not recognized"),
        ({"test": []}, "no split to train on"),
        ("reasoning_gym:chain_summ", "no task"),
    ],
)
def test_unreadable_sources_are_refused(source: Any, fragment: str) -> None:
    with pytest.raises(DataError, match=fragment):
        DataModule.of(source)


def test_folders_without_a_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        DataModule.of(tmp_path)
    _jsonl(tmp_path / "a.jsonl", TRAIN)
    (tmp_path / "b.csv").write_text("prompt,answer\n1,2\n")
    with pytest.raises(DataError, match=r"files with \.csv and \.jsonl"):
        DataModule.of(tmp_path)
    datasets.DatasetDict({"train": _dataset(TRAIN)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="several splits"):
        DataModule.of(FileData(train=str(tmp_path / "saved"), validation="x.jsonl"))


def test_columns_are_renamed_and_folders_read_by_a_recipe(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "reply": row["answer"]} for row in TRAIN]
    _jsonl(tmp_path / "train" / "0.jsonl", rows)
    validation = _jsonl(tmp_path / "validation.jsonl", [{"question": "8+1=", "reply": "9"}])
    data = DataModule.of(
        FileData(
            train=str(tmp_path / "train"),
            validation=str(validation),
            columns={"question": "prompt", "reply": "answer"},
        )
    )
    assert prompts(data.train) == [row["prompt"] for row in TRAIN]


@pytest.mark.slow
def test_a_hub_name_without_a_network_is_a_data_error(tmp_path: Path) -> None:
    program = (
        "from nemo_rl_core.data.module import DataModule\n"
        "from nemo_rl_core.errors import DataError\n"
        "try:\n    DataModule.of('no-organization/no-data')\n"
        "except DataError as error:\n    print(error)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "'no-organization/no-data' cannot be fetched" in shown
    assert "kind: file" in shown
    assert len(shown.splitlines()) == 4


def test_a_hub_config_takes_or_makes_a_validation_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # load_dataset reads a folder with the same call as a hub name.
    _jsonl(tmp_path / "data" / "train.jsonl", TRAIN)
    _jsonl(tmp_path / "data" / "test.jsonl", HELD)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    name = str(tmp_path / "data")
    named = DataModule.of(HubData(name=name, validation="test"))
    assert prompts(named.validation) == ["6+1=", "7+1="]
    # A third of 6
    sampled = DataModule.of(HubData(name=name, validation_fraction=1 / 3))
    assert (len(sampled.train), len(sampled.validation)) == (4, 2)
    with pytest.raises(DataError, match="no split 'dev'"):
        DataModule.of(HubData(name=name, validation="dev"))


def test_masks_of_conversations_are_checked_before_anything_starts(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    def row(number: int) -> dict[str, Any]:
        contents = [str(number), "<think>x</think>b", "c", "d"]
        roles = ["user", "assistant"] * 2
        return {
            "messages": [
                {"role": role, "content": text} for role, text in zip(roles, contents, strict=True)
            ]
        }

    tokenizer = byte_tokenizer("forgetful")
    rows = [row(number) for number in range(4)]
    assert {*DataModule.of(rows, tokenizer=tokenizer).train["mask"]} == {"all_assistant_turns"}
    other = byte_tokenizer("forgetful")
    other.chat_template = other.chat_template.replace(
        "assistant\n{% endif %}", "other\n{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 0 \(counted from 0\): the conversation"):
        DataModule.of(rows, tokenizer=other)
    data = DataModule.of(rows, tokenizer=tokenizer, policy=RowPolicy(mask="final_turn"))
    assert data.kind == "conversations"
    assert set(data.train["mask"]) == {"final_turn"}
