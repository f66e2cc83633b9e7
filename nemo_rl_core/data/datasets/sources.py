"""Reading of data sources of any type into training and validation rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import FileData, HubData, MixtureData
from nemo_rl_core.config.generated_data import (
    ArithmeticData,
    GuessNumberData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets import files, hub, load_parts
from nemo_rl_core.data.datasets.formats import Recognised, recognise
from nemo_rl_core.data.datasets.parts import Parts
from nemo_rl_core.data.datasets.records import Records, of_dataset
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote

_SUFFIXES = (".jsonl", ".csv", ".parquet", ".arrow", ".json", ".txt")


_CONFIGS = (
    ArithmeticData
    | ReasoningGymData
    | SlidingPuzzleData
    | GuessNumberData
    | FileData
    | HubData
    | MixtureData
)


def read(source: Any, *, seed: int, form: RowFormat | None = None) -> Parts:
    """Reads the rows of a source; its type selects the reader.

    Args:
        source: `arithmetic`; `reasoning_gym:TASK` (or several, with commas); the path of a file, a
            folder of files or a folder that `datasets` saved; an address as `s3://BUCKET/PATH`;
            `organization/name` on the hub, with
            `:SUBSET` where it has several; a list of dicts; a `datasets.Dataset` or `DatasetDict`;
            or a data config of a recipe.
        seed: Seed of generated rows.
        form: How columns are read; None recognises them, or is that of the data config.

    Raises:
        DataError: When the source cannot be read, or is none of these.

    Example:
        >>> parts = read([{"prompt": "1+1=", "answer": "2"}], seed=0)
        >>> parts.train[0]["completion"], parts.validation
        ('2', None)
    """
    if isinstance(source, _CONFIGS):
        _refuse_form(form, f"a data config of kind {source.kind!r}")
        return load_parts(source, seed=seed)
    reader = _Reader(form)
    if isinstance(source, str | Path):
        return reader.named(str(source), seed=seed)
    if isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        rows = [dict(row) for row in source[: reader.limit]]
        return reader.rows(rows, "the list of rows", "list")
    if isinstance(source, Mapping):
        parts = {name: _reader_of(part) for name, part in source.items()}
        return reader.splits(parts, "the data set")
    if hasattr(source, "column_names"):  # a datasets.Dataset, recognised without importing datasets
        return reader.rows(of_dataset(source, reader.limit), "the data set", "dataset")
    raise DataError(
        "this data source is not recognised",
        expected="a hub name, a path, a list of dicts, a datasets.Dataset or DatasetDict, "
        "reasoning_gym:TASK, or arithmetic",
        got=type(source).__name__,
        fix="pass rows as a list of dicts",
    )


ReadSplit = Callable[[int | None], Records]
"""Reads the first so many records of one split, when it is used."""


@dataclass(frozen=True)
class _Reader:
    """Reads sources that say nothing of their columns."""

    form: RowFormat | None

    @property
    def limit(self) -> int | None:
        """The most records of a split that are read."""
        return None if self.form is None else self.form.max_rows

    def named(self, name: str, *, seed: int) -> Parts:
        if name == "arithmetic":
            _refuse_form(self.form, repr(name))
            return load_parts(ArithmeticData(), seed=seed)
        kind, _, rest = name.partition(":")
        if kind == "reasoning_gym":
            _refuse_form(self.form, repr(name))
            tasks = [task for task in rest.split(",") if task]
            return load_parts(ReasoningGymData(tasks=tasks or ["chain_sum"]), seed=seed)
        if remote.is_remote(name):
            return self.rows(files.read_named(name, limit=self.limit), name, "file")
        path = Path(name).expanduser()
        if path.is_dir():
            return self.folder(path)
        if path.exists() or _looks_like_a_path(name):
            return self.rows(files.read_records(path, limit=self.limit), str(path), "file")
        fetched = hub.fetch(kind, subset=rest or None, revision=None)
        return self.splits({split: _reader_of(part) for split, part in fetched.items()}, kind)

    def folder(self, path: Path) -> Parts:
        if (path / "dataset_dict.json").is_file():
            saved = sorted(part for part in path.iterdir() if part.is_dir())
            return self.splits({part.name: _reader_of_path(part) for part in saved}, str(path))
        if (path / "state.json").is_file():
            return self.rows(files.read_records(path, limit=self.limit), str(path), "file")
        found = files.data_files(path)
        by_split: dict[str, list[Path]] = {}
        # Without a training file, file names are not read as splits: all rows are one set.
        named = any(_split_of(file) == "train" for file in found)
        for file in found:
            by_split.setdefault(_split_of(file) if named else "train", []).append(file)
        return self.splits(
            {split: _reader_of_files(of) for split, of in by_split.items()}, str(path)
        )

    def splits(self, splits: Mapping[str, ReadSplit], where: str) -> Parts:
        """The split `train`, and the validation split if there is one; no other is read."""
        if "train" not in splits:
            raise DataError(
                f"{where} has no split to train on",
                expected="a split named train",
                got=", ".join(map(str, splits)) or "no splits",
                fix="pass the split itself, or name it in the recipe (data.train)",
            )
        held = next((name for name in hub.VALIDATION_NAMES if name in splits), None)
        train = self._read(splits["train"](self.limit), f"the split train of {where}", where)
        if held is None:
            return Parts(train.rows, None, train.read_as)
        validation = self._read(splits[held](self.limit), f"the split {held} of {where}", where)
        return Parts(train.rows, validation.rows, train.read_as)

    def rows(self, records: Records, where: str, task: str) -> Parts:
        found = self._read(records, where, task)
        return Parts(found.rows, None, found.read_as)

    def _read(self, records: Records, where: str, task: str) -> Recognised:
        return recognise(records, where=where, task=task, form=self.form)


def _reader_of(part: Any) -> ReadSplit:
    return partial(of_dataset, part)


def _reader_of_path(path: Path) -> ReadSplit:
    return lambda limit: files.read_records(path, limit=limit)


def _reader_of_files(paths: Sequence[Path]) -> ReadSplit:
    return lambda limit: files.read_files(paths, limit=limit)


def _refuse_form(form: RowFormat | None, source: str) -> None:
    if form is not None and form != RowFormat():
        given = ", ".join(sorted(form.model_fields_set))
        raise DataError(
            f"{source} says itself how its rows are read",
            expected="columns, format, system_prompt and so on beside a path, a hub name or rows",
            got=given,
            fix="write them into the config (FileData, HubData), or leave them out",
        )


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.lower().endswith(_SUFFIXES)


def _split_of(file: Path) -> str:
    """`train` of `train-00000-of-00002.parquet`: the leading letters of the file's name."""
    stem = file.stem.lower()
    return stem[: next((n for n, char in enumerate(stem) if not char.isalpha()), len(stem))]
