"""Rows from the Hugging Face hub, and from `datasets.Dataset` objects."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.config.data import HubData
from nemo_rl_core.data.datasets.formats import Recognised, recognise
from nemo_rl_core.data.datasets.parts import Parts, without_validation
from nemo_rl_core.data.datasets.records import of_dataset
from nemo_rl_core.errors import DataError
from nemo_rl_core.telemetry.waiting import waiting_for_files

VALIDATION_NAMES = ("validation", "valid", "val", "dev")
"""Names of splits to validate on, where none is named."""


def load(config: HubData, *, seed: int) -> Parts:
    """Training rows and validation rows of a data set on the hub.

    Args:
        config: The data set's name and splits, and how its columns are read.
        seed: For held-out rows, if the config has no validation split.

    Raises:
        DataError: When it cannot be fetched, has no such split, or is in no known format.
    """
    wanted = [name for name in (config.train, config.validation) if name is not None]
    splits = fetch(config.name, subset=config.subset, revision=config.revision, wanted=wanted)
    train = _rows(config, splits, config.train)
    if config.validation is not None:
        held = _rows(config, splits, config.validation)
        return Parts(train.rows, held.rows, train.read_as)
    return without_validation(
        Parts(train.rows, None, train.read_as),
        fraction=config.validation_fraction,
        seed=seed,
        where=config.name,
    )


def read_validation(config: HubData) -> Recognised:
    """The rows of the validation split, which the config names; no other split is read.

    Raises:
        DataError: As for `load`.
    """
    assert config.validation is not None, "the config names a validation split"
    splits = fetch(
        config.name, subset=config.subset, revision=config.revision, wanted=[config.validation]
    )
    return _rows(config, splits, config.validation)


def fetch(
    name: str, *, subset: str | None, revision: str | None, wanted: Sequence[str] | None = None
) -> Mapping[str, Any]:
    """Splits of a data set on the hub, downloaded once into the cache of `datasets`.

    Args:
        name: As `organization/name`.
        subset: The configuration, where the data set has several.
        revision: A commit or tag.
        wanted: Splits whose files are fetched; those of others are not, where each split has
            files of its own. None takes `train` and the split to validate on.

    Raises:
        DataError: When the name is unknown or the hub cannot be reached.
    """
    import datasets

    assert datasets  # before `hub_access`, which sets its copy of a setting
    with hub_access(name) as problem:
        return _fetched(name, subset, revision, wanted, problem=problem)


def _fetched(
    name: str,
    subset: str | None,
    revision: str | None,
    wanted: Sequence[str] | None,
    *,
    problem: str,
) -> Mapping[str, Any]:
    from datasets import config, load_dataset, load_dataset_builder

    folders = [hub_folder("dataset", name), Path(config.HF_DATASETS_CACHE)]
    try:
        by_split = _files_by_split(load_dataset_builder(name, subset, revision=revision))
        _refuse_missing(name, wanted if by_split else (), by_split)
        files = _files_of(by_split, wanted)
        with waiting_for_files(f"fetching {name}", *folders):
            parts: Mapping[str, Any] = load_dataset(
                name,
                subset,
                revision=revision,
                data_files=files,
                # The card counts all splits, and would refuse a part of them.
                verification_mode="no_checks" if files else None,
            )
    except DataError:
        raise
    # Named fault boundary: network, hub and parsers raise errors of many classes.
    except Exception as error:
        raise DataError(
            f"the data set {name!r} cannot be fetched from the Hugging Face hub",
            expected="a public organization/name and a network, or a copy in the cache",
            got=problem or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix="check the name, subset and revision; without a network, name a local file or "
            "folder instead (kind: file)",
        ) from error
    return parts


def _files_by_split(builder: Any) -> dict[str, list[str]]:
    """The files of each split; empty where the data set does not say them."""
    files = builder.config.data_files or {}
    return {str(split): [str(file) for file in found] for split, found in files.items()}


def _files_of(
    by_split: Mapping[str, list[str]], wanted: Sequence[str] | None
) -> dict[str, list[str]] | None:
    """The files of the wanted splits; None where there are no others."""
    chosen = used_splits(by_split) if wanted is None else wanted
    if not {*chosen} < {*by_split}:
        return None
    return {split: by_split[split] for split in chosen}


def used_splits(splits: Iterable[str]) -> list[str]:
    """The split to train on and the one to validate on, of those that there are."""
    held = next((name for name in VALIDATION_NAMES if name in {*splits}), None)
    return ["train"] if held is None else ["train", held]


def _rows(config: HubData, parts: Mapping[str, Any], split: str) -> Recognised:
    _refuse_missing(config.name, [split], parts)
    where = f"the split {split} of {config.name}"
    records = of_dataset(parts[split], config.max_rows)
    return recognise(records, where=where, task=config.name, form=config.reading())


def _refuse_missing(name: str, wanted: Sequence[str] | None, splits: Mapping[str, Any]) -> None:
    for split in wanted or ():
        if split not in splits:
            raise DataError(
                f"the data set {name!r} has no split {split!r}",
                expected=f"one of {', '.join(splits)}",
                got=split,
                fix="correct data.train or data.validation",
            )
