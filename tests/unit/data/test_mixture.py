"""Rows of several sources in one data set."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.data import MixtureData
from nemo_rl_core.data.datasets import load_parts
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError


def _file(folder: Path, name: str, count: int, **row: str) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    rows = [{"question": f"{name} {n}", "answer": str(n), **row} for n in range(count)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    validation = folder / f"{name}-validation.jsonl"
    question = f"{name} validation"
    validation.write_text(json.dumps({"question": question, "answer": "1", **row}) + "\n")
    return {"kind": "file", "train": str(path), "validation": str(validation), "task": name}


def _mixture(folder: Path, *weights: float | None, **keys: Any) -> MixtureData:
    sources = [
        {"weight": weight, "data": _file(folder, name, count)}
        for weight, (name, count) in zip(weights, (("a", 40), ("b", 10)), strict=True)
    ]
    return MixtureData.model_validate({"kind": "mixture", "sources": sources, **keys})


def _counts(config: MixtureData, seed: int = 0) -> dict[str, int]:
    tasks = [row["task"] for row in load_parts(config, seed=seed).train]
    return {task: tasks.count(task) for task in sorted(set(tasks))}


def test_weights_say_how_many_rows_each_source_gives(tmp_path: Path) -> None:
    assert _counts(_mixture(tmp_path, None, None)) == {"a": 40, "b": 10}
    # b has 10 rows, and a gives three times as many.
    assert _counts(_mixture(tmp_path, 3, 1)) == {"a": 30, "b": 10}
    # a has 40 rows, and b gives a ninth of that.
    assert _counts(_mixture(tmp_path, 9, 1)) == {"a": 40, "b": 4}
    assert _counts(_mixture(tmp_path, 1, 1, num_train=15)) == {"a": 8, "b": 7}


def test_the_seed_alone_draws_the_rows(tmp_path: Path) -> None:
    config = _mixture(tmp_path, 1, 1)
    one, again, other = (load_parts(config, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one.train != other.train
    assert [row["prompt"] for row in one.validation or []] == ["a validation", "b validation"]
    assert one.read_as.startswith("0: question_answer: prompts with answers; 1: question_answer")


def test_rows_repeat_on_request(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="source 1 of the mixture has too few rows"):
        load_parts(_mixture(tmp_path, 1, 1, num_train=50), seed=0)
    config = _mixture(tmp_path, 1, 1, num_train=50, duplicates="keep")
    data = DataModule.of(config)
    drawn = data.train[data.train["task"] == "b"]["prompt"]
    # Two full passes over 10 rows, and 5 rows of a third
    assert len(drawn) == 25
    assert sorted(set(drawn.value_counts())) == [2, 3]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sources 1 have no weight"):
        _mixture_of(tmp_path, {"weight": 1}, {})
    with pytest.raises(ValueError, match="num_train draws rows by weights"):
        _mixture_of(tmp_path, {}, {}, num_train=3)
    source = {"kind": "arithmetic", "duplicates": "drop"}
    with pytest.raises(ValueError, match="duplicates applies to all rows of a mixture"):
        MixtureData.model_validate({"sources": [{"data": source}]})
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n' * 2)
    config = MixtureData.model_validate(
        {
            "sources": [
                {"data": _file(tmp_path, "a", 4)},
                {"data": {"kind": "file", "train": str(pairs), "validation": str(pairs)}},
            ]
        }
    )
    with pytest.raises(DataError, match="different kinds"):
        load_parts(config, seed=0)


def _mixture_of(folder: Path, *sources: dict[str, Any], **keys: Any) -> MixtureData:
    data = [{"data": _file(folder, "a", 4), **source} for source in sources]
    return MixtureData.model_validate({"sources": data, **keys})
