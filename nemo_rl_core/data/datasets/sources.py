"""Reading of data sources of any type into training and validation rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import (
    ArithmeticData,
    FileData,
    GuessNumberData,
    HubData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.data.datasets import files, hub, load_rows
from nemo_rl_core.data.datasets.formats import recognise
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

_VALIDATION_NAMES = ("validation", "valid", "val", "dev")
_SUFFIXES = (".jsonl", ".csv", ".parquet", ".arrow", ".json", ".txt")


_CONFIGS = (
    ArithmeticData | ReasoningGymData | SlidingPuzzleData | GuessNumberData | FileData | HubData
)


@dataclass(frozen=True)
class Parts:
    """The rows of a source; `validation` is None if the source has none.

    Example:
        >>> parts = read([{"prompt": "1+1=", "answer": "2"}], seed=0)
        >>> parts.train[0]["completion"], parts.validation
        ('2', None)
    """

    train: list[Row]
    validation: list[Row] | None


def read(source: Any, *, seed: int) -> Parts:
    """Reads the rows of a source; its type selects the reader.

    Args:
        source: `arithmetic`; `reasoning_gym:TASK` (or several, with commas); the path of a file, a
            folder of files or a folder that `datasets` saved; `organization/name` on the hub, with
            `:SUBSET` where it has several; a list of dicts; a `datasets.Dataset` or `DatasetDict`;
            or a data config of a recipe.
        seed: Seed of generated rows.

    Raises:
        DataError: When the source cannot be read, or is none of these.
    """
    if isinstance(source, _CONFIGS):
        return Parts(*load_rows(source, seed=seed))
    if isinstance(source, str | Path):
        return _named(str(source), seed=seed)
    if isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        return Parts(_recognised([dict(row) for row in source], "the list of rows", "list"), None)
    if isinstance(source, Mapping):
        return _splits(source, "the data set")
    if hasattr(source, "column_names"):  # a datasets.Dataset, recognised without importing datasets
        return Parts(_recognised(hub.records_of(source), "the data set", "dataset"), None)
    raise DataError(
        "this data source is not recognised",
        expected="a hub name, a path, a list of dicts, a datasets.Dataset or DatasetDict, "
        "reasoning_gym:TASK, or arithmetic",
        got=type(source).__name__,
        fix="pass rows as a list of dicts",
    )


def _named(name: str, *, seed: int) -> Parts:
    if name == "arithmetic":
        return Parts(*load_rows(ArithmeticData(), seed=seed))
    kind, _, rest = name.partition(":")
    if kind == "reasoning_gym":
        tasks = [task for task in rest.split(",") if task]
        return Parts(*load_rows(ReasoningGymData(tasks=tasks or ["chain_sum"]), seed=seed))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists() or _looks_like_a_path(name):
        return Parts(_recognised(files.read_records(path), str(path), "file"), None)
    return _splits(hub.fetch(kind, subset=rest or None, revision=None), kind)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.lower().endswith(_SUFFIXES)


def _folder(path: Path) -> Parts:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part for part in path.iterdir() if part.is_dir())
        return _splits({part.name: files.read_records(part) for part in splits}, str(path))
    if (path / "state.json").is_file():
        return Parts(_recognised(files.read_records(path), str(path), "file"), None)
    found = files.data_files(path)
    by_split: dict[str, list[dict[str, Any]]] = {}
    # Without a training file, file names are not read as splits: all rows are one set.
    named = any(_split_of(file) == "train" for file in found)
    for file in found:
        split = _split_of(file) if named else "train"
        by_split.setdefault(split, []).extend(files.read_records(file))
    return _splits(by_split, str(path))


def _split_of(file: Path) -> str:
    """`train` of `train-00000-of-00002.parquet`: the leading letters of the file's name."""
    stem = file.stem.lower()
    return stem[: next((n for n, char in enumerate(stem) if not char.isalpha()), len(stem))]


def _splits(splits: Mapping[str, Any], where: str) -> Parts:
    """The split `train`, and the validation split if there is one; other splits are not read."""
    if "train" not in splits:
        raise DataError(
            f"{where} has no split to train on",
            expected="a split named train",
            got=", ".join(map(str, splits)) or "no splits",
            fix="pass the split itself, or name it in the recipe (data.train)",
        )
    held = next((name for name in _VALIDATION_NAMES if name in splits), None)
    train, validation = (
        _recognised(hub.records_of(splits[name]), f"the split {name} of {where}", where)
        if name
        else None
        for name in ("train", held)
    )
    return Parts(train or [], validation)


def _recognised(records: Sequence[dict[str, Any]], where: str, task: str) -> list[Row]:
    return recognise(records, where=where, task=task)
