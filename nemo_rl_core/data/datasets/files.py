"""Data files on this machine or in an object store: jsonl, json, csv, parquet and arrow files,
folders of them, and saved data sets.

Files are read without `datasets`, which copies every file into its cache and infers types (an
answer `007` in a csv would become 7). Folders saved by `datasets` are read with it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from nemo_rl_core.config.data import FileData
from nemo_rl_core.data.datasets.file_formats import (
    read_arrow,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_saved,
)
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.datasets.parts import Parts, Recognized, without_validation
from nemo_rl_core.data.datasets.records import Records, joined
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting


def load(config: FileData, *, seed: int) -> Parts:
    """Reads training and validation rows in file order and converts them by `formats.recognize`."""
    train = read_split(config, config.train)
    if config.validation is None:
        return without_validation(
            train, fraction=config.validation_fraction, seed=seed, where=config.train
        )
    return Parts(train.rows, read_split(config, config.validation).rows, train.read_as)


def read_split(config: FileData, name: str) -> Recognized:
    """Reads the rows of one file or folder by the config's row format."""
    records = read_named(name, limit=config.max_rows)
    return recognize(
        records, where=name, task="file", form=config.reading(), drops_invalid=config.drops_invalid
    )


def read_named(name: str, *, limit: int | None = None) -> Records:
    """Reads the records of a local path, like `read_records`, or of an object store's address."""
    if remote.is_remote(name):
        return read_files(_fetched(name), limit)
    return read_records(Path(name).expanduser(), limit)


def _fetched(address: str) -> list[Path]:
    folder = Store.default().cache / "remote"
    objects = remote.listing(address)
    paths = [
        resolve_below(
            folder / item.digest[:32],
            PurePosixPath(item.address).name,
            source=f"the listing of {address}",
        )
        for item in objects
    ]
    missing = [
        (item, path) for item, path in zip(objects, paths, strict=True) if not path.is_file()
    ]
    if missing:
        total = sum(item.size for item, _ in missing)
        with waiting(f"fetching {address}", total=total, unit="bytes") as wait:
            for item, path in missing:
                remote.fetch(item, path)
                wait.advance(item.size)
    return paths


def read_records(path: Path, limit: int | None = None) -> Records:
    """Reads the records of a file, of a folder saved by `datasets`, or of all files of a folder.

    Args:
        path: A file or folder. Files of a folder are read in order of their names and must have
            the same suffix.
        limit: Maximum number of records; later records are not read. None reads all.

    Raises:
        DataError: When it cannot be read; for parquet and arrow files, during iteration.
    """
    if not path.is_dir():
        return _read_file(path, limit)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise DataError(
            f"the folder {path} contains several splits",
            expected="the folder of one split, or DataModule.of(folder)",
            got=f"splits {', '.join(splits)}",
            fix="name the folder of a split, such as .../train",
        )
    if (path / "state.json").is_file():
        return read_saved(path, limit)
    return read_files(data_files(path), limit)


def read_files(paths: Sequence[Path], limit: int | None = None) -> Records:
    """Reads the records of files in order; files beyond the limit are not opened."""
    parts: list[Records] = []
    for path in paths:
        remaining = None if limit is None else limit - sum(map(len, parts))
        if remaining is not None and remaining <= 0:
            break
        parts.append(_read_file(path, remaining))
    return joined(parts)


def data_files(folder: Path) -> list[Path]:
    """Returns the data files of a folder, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    # Next to other data files, .json files only describe them, like dataset_infos.json.
    files = [file for file in files if file.suffix.lower() != ".json"] or files
    suffixes = sorted({file.suffix.lower() for file in files})
    if len(suffixes) != 1:
        raise DataError(
            f"the folder {folder} cannot be read as one data set",
            expected=f"files with one suffix of {', '.join(_READERS)}, or a saved data set",
            got=f"files with {' and '.join(suffixes)}" if suffixes else "no such file",
            fix="name one file, or keep the data in a separate folder",
        )
    return files


def _read_file(path: Path, limit: int | None) -> Records:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the data file {path} has an unknown suffix",
            expected=f"one of {', '.join(_READERS)}",
            got=path.suffix or "none",
            fix="convert it, or rename it if it is one of these",
        )
    if not path.is_file():
        raise DataError(
            f"the data file {path} does not exist",
            expected="an absolute path, or one relative to the current directory",
            got="no file at this path",
            fix="correct the path: data.train or data.validation of a recipe, dataset or "
            "eval_dataset in Python",
        )
    return reader(path, limit)


_READERS: dict[str, Callable[[Path, int | None], Records]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".json": read_json,
}
