"""Reads data sources of any type into training and validation rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from nemo_rl_core.config.data import DataConfig
from nemo_rl_core.config.generated_data import ArithmeticData, ReasoningGymData
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets import files, hub, load_parts
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.datasets.parts import Parts, Recognized
from nemo_rl_core.data.datasets.records import Records, dataset_records
from nemo_rl_core.data.json_values import plain_row
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote

_SUFFIXES = (".jsonl", ".csv", ".parquet", ".arrow", ".json", ".txt")
_CONFIGS = get_args(get_args(DataConfig)[0])


def read(
    source: Any, *, seed: int, form: RowFormat | None = None, drops_invalid: bool = False
) -> Parts:
    """Reads the rows of a source; its type selects the reader.

    Args:
        source: `arithmetic`; `reasoning_gym:TASK` (or several, with commas); the path of a file, a
            folder of files or a folder that `datasets` saved; an address such as
            `s3://BUCKET/PATH`; `organization/name` on the hub, with `:SUBSET` if it has several; a
            list of dicts; a `datasets.Dataset` or `DatasetDict`; or a data config of a recipe.
        form: How columns are read; None recognizes them, or uses that of the data config.
        drops_invalid: Whether `recognize` drops rows that do not fit; ignored for a data config,
            which has its own setting.

    Example:
        >>> parts = read([{"prompt": "1+1=", "answer": "2"}], seed=0)
        >>> parts.train[0]["completion"], parts.validation
        ('2', None)
    """
    if isinstance(source, _CONFIGS):
        _refuse_form(form, f"a data config of kind {source.kind!r}")
        return load_parts(source, seed=seed)
    reader = _Reader(form, drops_invalid)
    if isinstance(source, str | Path):
        return reader.named(str(source), seed=seed)
    if isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        rows = [plain_row(row) for row in source[: reader.limit]]
        return reader.rows(rows, "the list of rows", "list")
    if isinstance(source, Mapping):
        parts = {name: partial(dataset_records, part) for name, part in source.items()}
        return reader.splits(parts, "the data set")
    if hasattr(source, "column_names"):  # a datasets.Dataset, recognized without importing datasets
        return reader.rows(dataset_records(source, reader.limit), "the data set", "dataset")
    raise DataError(
        "this data source is not recognized",
        expected="a hub name, a path, a list of dicts, a datasets.Dataset or DatasetDict, "
        "reasoning_gym:TASK, or arithmetic",
        got=type(source).__name__,
        fix="pass rows as a list of dicts",
    )


ReadSplit = Callable[[int | None], Records]
"""Reads the records of one split, at most as many as the argument."""


@dataclass(frozen=True)
class _Reader:
    form: RowFormat | None
    drops_invalid: bool = False

    @property
    def limit(self) -> int | None:
        """Maximum number of records of a split."""
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
        is_path = name.startswith((".", "/", "~")) or name.lower().endswith(_SUFFIXES)
        if path.exists() or is_path:
            return self.rows(files.read_records(path, self.limit), str(path), "file")
        fetched = hub.fetch(kind, subset=rest or None, revision=None)
        parts = {split: partial(dataset_records, part) for split, part in fetched.items()}
        return self.splits(parts, kind)

    def folder(self, path: Path) -> Parts:
        if (path / "dataset_dict.json").is_file():
            saved = sorted(part for part in path.iterdir() if part.is_dir())
            parts = {part.name: partial(files.read_records, part) for part in saved}
            return self.splits(parts, str(path))
        if (path / "state.json").is_file():
            return self.rows(files.read_records(path, self.limit), str(path), "file")
        data_files = files.data_files(path)
        by_split: dict[str, list[Path]] = {}
        # Without a file named train, file names are not splits: all rows are one set.
        has_splits = any(_split_of(file) == "train" for file in data_files)
        for file in data_files:
            by_split.setdefault(_split_of(file) if has_splits else "train", []).append(file)
        return self.splits(
            {split: partial(files.read_files, paths) for split, paths in by_split.items()},
            str(path),
        )

    def splits(self, splits: Mapping[str, ReadSplit], where: str) -> Parts:
        """Reads only the split `train`, and the validation split if there is one."""
        if "train" not in splits:
            raise DataError(
                f"{where} has no split to train on",
                expected="a split named train",
                got=", ".join(map(str, splits)) or "no splits",
                fix="pass one split, or name it in the recipe (data.train)",
            )
        name = next((name for name in hub.VALIDATION_NAMES if name in splits), None)
        train = self._read(splits["train"](self.limit), f"the split train of {where}", where)
        if name is None:
            return Parts(train.rows, None, train.read_as)
        validation = self._read(splits[name](self.limit), f"the split {name} of {where}", where)
        return Parts(train.rows, validation.rows, train.read_as)

    def rows(self, records: Records, where: str, task: str) -> Parts:
        recognized = self._read(records, where, task)
        return Parts(recognized.rows, None, recognized.read_as)

    def _read(self, records: Records, where: str, task: str) -> Recognized:
        return recognize(
            records, where=where, task=task, form=self.form, drops_invalid=self.drops_invalid
        )


def _refuse_form(form: RowFormat | None, source: str) -> None:
    if form is not None and form != RowFormat():
        raise DataError(
            f"{source} already defines how its rows are read",
            expected="columns, format, system_prompt and so on with a path, a hub name or rows",
            got=", ".join(sorted(form.model_fields_set)),
            fix="write them into the config (FileData, HubData), or remove them",
        )


def _split_of(file: Path) -> str:
    """Returns the leading letters of a file name: `train` for `train-00000-of-00002.parquet`."""
    stem = file.stem.lower()
    return stem[: next((n for n, char in enumerate(stem) if not char.isalpha()), len(stem))]
