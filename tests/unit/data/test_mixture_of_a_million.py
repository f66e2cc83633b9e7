"""A mixture of a million rows, from files to the data set folder."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_core.config.data import MixtureData
from nemo_rl_core.data.loader import PromptLoader, load_records, save_frame
from nemo_rl_core.data.module import DataModule

_SIZES = {"school": 500_000, "competition": 400_000, "web": 100_000}


@pytest.mark.thorough
def test_a_mixture_of_a_million_rows(tmp_path: Path) -> None:
    names = {"school": ("question", "answer"), "competition": ("problem", "expected_answer")}
    sources = []
    for name, size in _SIZES.items():
        asked, answered = names.get(name, ("query", "label"))
        columns = {
            asked: [f"{name}: what is {number} + 1?" for number in range(size)],
            answered: [f"#### {number + 1}" for number in range(size)]
            if name == "school"
            else [str(number + 1) for number in range(size)],
        }
        if name == "competition":
            columns["generated_solution"] = columns["problem"]
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        data = {"kind": "file", "train": str(tmp_path / f"{name}.parquet"), "task": name}
        if name == "web":
            data |= {"columns": {"query": "prompt", "label": "answer"}}
        sources.append({"weight": {"school": 5, "competition": 4, "web": 1}[name], "data": data})
    config = MixtureData.model_validate({"kind": "mixture", "sources": sources})
    data = DataModule.of(config)
    assert {name: (data.train["task"] == name).sum() for name in _SIZES} == {
        "school": 475_000,
        "competition": 380_000,
        "web": 95_000,
    }
    assert len(data.validation) == 50_000
    save_frame(data.train, tmp_path / "train")
    loader = PromptLoader(load_records(tmp_path / "train"), batch_size=64, seed=0)
    batch = loader.batch(0)
    assert {row["task"] for row in batch} == {*_SIZES}
    for row in batch:
        number = int(row["id"].partition("/")[2])
        assert f"what is {number} + 1?" in row["prompt"]
        assert row["answer"] == str(number + 1)
    assert loader.batch(14_843) != batch
