"""Rows from the Hugging Face hub, and from `datasets.Dataset` objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.config.data import HubData
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.datasets.parts import Parts, Recognized, without_validation
from nemo_rl_core.data.datasets.records import dataset_records
from nemo_rl_core.errors import DataError
from nemo_rl_core.telemetry.waiting import waiting_for_files

VALIDATION_NAMES = ("validation", "valid", "val", "dev")
"""Names of splits that are used for validation by default."""


def load(config: HubData, *, seed: int) -> Parts:
    """Loads training and validation rows of a data set on the hub."""
    names = [name for name in (config.train, config.validation) if name is not None]
    splits = fetch(config.name, subset=config.subset, revision=config.revision, splits=names)
    train = _rows(config, splits, config.train)
    if config.validation is not None:
        validation = _rows(config, splits, config.validation)
        return Parts(train.rows, validation.rows, train.read_as)
    return without_validation(
        train, fraction=config.validation_fraction, seed=seed, where=config.name
    )


def read_validation(config: HubData) -> Recognized:
    """Loads only the validation split that the config names."""
    assert config.validation is not None, "the config names a validation split"
    splits = fetch(
        config.name, subset=config.subset, revision=config.revision, splits=[config.validation]
    )
    return _rows(config, splits, config.validation)


def fetch(
    name: str, *, subset: str | None, revision: str | None, splits: Sequence[str] | None = None
) -> Mapping[str, Any]:
    """Fetches splits of a data set on the hub, once, into the cache of `datasets`.

    Args:
        splits: Splits to fetch; None fetches `train` and the validation split. Files of other
            splits are not downloaded, if each split has separate files.
    """
    # Imported before `hub_access`, which sets its copy of a setting.
    from datasets import config, load_dataset, load_dataset_builder

    folders = [hub_folder("dataset", name), Path(config.HF_DATASETS_CACHE)]
    with hub_access(name) as problem:
        try:
            listed = load_dataset_builder(name, subset, revision=revision).config.data_files or {}
            # Empty if the data set does not list its files.
            by_split = {str(split): [*map(str, paths)] for split, paths in listed.items()}
            _refuse_missing(name, (splits or ()) if by_split else (), by_split)
            files = _files_of(by_split, splits)
            with waiting_for_files(f"fetching {name}", *folders):
                parts: Mapping[str, Any] = load_dataset(
                    name,
                    subset,
                    revision=revision,
                    data_files=files,
                    # The card has the size of all splits, so a check of some would fail.
                    verification_mode="no_checks" if files else None,
                )
        except DataError:
            raise
        # Fault boundary: network, hub and parsers raise errors of many classes.
        except Exception as error:
            raise DataError(
                f"the data set {name!r} cannot be fetched from the Hugging Face hub",
                expected="a public organization/name and network access, or a copy in the cache",
                got=problem or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                fix="check the name, subset and revision; without network access, use a local "
                "file or folder instead (kind: file)",
            ) from error
    return parts


def _files_of(
    by_split: Mapping[str, list[str]], splits: Sequence[str] | None
) -> dict[str, list[str]] | None:
    """Returns the files of the requested splits; None if these are all splits."""
    if splits is None:
        validation = next((name for name in VALIDATION_NAMES if name in by_split), None)
        splits = ["train"] if validation is None else ["train", validation]
    if not {*splits} < {*by_split}:
        return None
    return {split: by_split[split] for split in splits}


def _rows(config: HubData, parts: Mapping[str, Any], split: str) -> Recognized:
    _refuse_missing(config.name, [split], parts)
    where = f"the split {split} of {config.name}"
    records = dataset_records(parts[split], config.max_rows)
    return recognize(
        records,
        where=where,
        task=config.name,
        form=config.reading(),
        drops_invalid=config.drops_invalid,
    )


def _refuse_missing(name: str, requested: Sequence[str], splits: Mapping[str, Any]) -> None:
    for split in requested:
        if split not in splits:
            raise DataError(
                f"the data set {name!r} has no split {split!r}",
                expected=f"one of {', '.join(splits)}",
                got=split,
                fix="correct data.train or data.validation",
            )
