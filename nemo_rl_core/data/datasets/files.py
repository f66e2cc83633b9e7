"""Data files of the user, here or in an object store: jsonl, csv, parquet and arrow files, folders
of them, saved data sets.

Files are read without `datasets`, which copies every file into its cache and infers types (an
answer `007` of a csv would become 7). Folders saved by `datasets` are read with it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from nemo_rl_core.config.data import FileData
from nemo_rl_core.data.datasets.file_formats import (
    read_arrow,
    read_csv,
    read_jsonl,
    read_parquet,
    read_saved,
)
from nemo_rl_core.data.datasets.formats import Recognised, recognise
from nemo_rl_core.data.datasets.parts import Parts, without_validation
from nemo_rl_core.data.datasets.records import (
    Records,
    joined,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting


def load(config: FileData, *, seed: int) -> Parts:
    """Reads training and validation rows in the order of their files, by `formats.recognise`.

    Args:
        config: The files, and how their columns are read.
        seed: For held-out rows, if the config has no validation file.

    Raises:
        DataError: When a file is missing, cannot be read, or is in no known format.
    """

    train = read_split(config, config.train)
    if config.validation is None:
        return without_validation(
            Parts(train.rows, None, train.read_as),
            fraction=config.validation_fraction,
            seed=seed,
            where=config.train,
        )
    return Parts(train.rows, read_split(config, config.validation).rows, train.read_as)


def read_split(config: FileData, name: str) -> Recognised:
    """The rows of one file or folder, as the config reads columns."""
    records = read_named(name, limit=config.max_rows)
    return recognise(records, where=name, task="file", form=config.reading())


def read_named(name: str, *, limit: int | None = None) -> Records:
    """The records under a path of this machine, as `read_records`, or an address in a store.

    Args:
        name: A path, or an address as `remote.listing` takes it.
        limit: The first so many records; None reads all.

    Raises:
        DataError: When it is missing or cannot be read.
    """
    if remote.is_remote(name):
        return read_files(_fetched(name), limit=limit)
    return read_records(Path(name).expanduser(), limit=limit)


def _fetched(address: str) -> list[Path]:
    """The objects under an address as files of the store, each version of an object once."""
    folder = Store.default().cache / "remote"
    objects = remote.listing(address)
    paths = [
        resolve_below(
            folder / each.digest[:32],
            PurePosixPath(each.address).name,
            source=f"the listing of {address}",
        )
        for each in objects
    ]
    missing = [
        (each, path) for each, path in zip(objects, paths, strict=True) if not path.is_file()
    ]
    if missing:
        total = sum(each.size for each, _ in missing)
        with waiting(f"fetching {address}", total=total, unit="bytes") as wait:
            for each, path in missing:
                remote.fetch(each, path)
                wait.advance(each.size)
    return paths


def read_records(path: Path, *, limit: int | None = None) -> Records:
    """Reads the records of a file, of a folder saved by `datasets`, or of all files of a folder.

    Args:
        path: Files of a folder are read in the order of their names and must have one suffix.
        limit: The first so many records; what follows them is not read. None reads all.

    Raises:
        DataError: When it is missing or cannot be read, or holds several kinds of files; parquet
            and arrow files are read when the records are gone through, and raise then.
    """
    if not path.is_dir():
        return _read_file(path, limit)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise DataError(
            f"the folder {path} holds several splits",
            expected="the folder of one split, or DataModule.of(folder)",
            got=f"splits {', '.join(splits)}",
            fix="name the folder of a split, such as .../train",
        )
    if (path / "state.json").is_file():
        return read_saved(path, limit)
    return read_files(data_files(path), limit=limit)


def read_files(paths: Sequence[Path], *, limit: int | None = None) -> Records:
    """The records of files in their order; files beyond the limit are not opened."""
    found: list[Records] = []
    for path in paths:
        left = None if limit is None else limit - sum(map(len, found))
        if left is not None and left <= 0:
            break
        found.append(_read_file(path, left))
    return joined(found)


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder, sorted by name.

    Raises:
        DataError: When there are none, or their suffixes differ.
    """
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    suffixes = sorted({file.suffix.lower() for file in found})
    if len(suffixes) != 1:
        raise DataError(
            f"the folder {folder} cannot be read as one data set",
            expected=f"files of one suffix of {', '.join(_READERS)}, or a saved data set",
            got=f"files of {' and '.join(suffixes)}" if suffixes else "no such file",
            fix="name one file, or keep the data in a folder of its own",
        )
    return found


def _read_file(path: Path, limit: int | None) -> Records:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the data file {path} has a suffix that is not known",
            expected=f"one of {', '.join(_READERS)}",
            got=path.suffix or "none",
            fix="convert it, or rename it if it is one of these",
        )
    if not path.is_file():
        raise DataError(
            f"the data file {path} does not exist",
            expected="a file, named absolutely or from the current directory",
            got="nothing there",
            fix="correct the name: data.train or data.validation of a recipe, dataset or "
            "eval_dataset in Python",
        )
    return reader(path, limit)


_READERS: dict[str, Callable[[Path, int | None], Records]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
