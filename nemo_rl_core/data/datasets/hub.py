"""Rows from the Hugging Face hub, and from `datasets.Dataset` objects."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.data import HubData
from nemo_rl_core.data.datasets.formats import recognise
from nemo_rl_core.data.datasets.split import hold_out
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

Records = list[dict[str, Any]]


def load(config: HubData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows and validation rows of a data set on the hub.

    Args:
        config: The data set's name and splits.
        seed: For held-out rows, if the config has no validation split.

    Raises:
        DataError: When it cannot be fetched, has no such split, or is in no known format.
    """
    parts = fetch(config.name, subset=config.subset, revision=config.revision)
    train = _rows(config, parts, config.train)
    if config.validation is not None:
        return train, _rows(config, parts, config.validation)
    held = set(hold_out(train, fraction=config.validation_fraction, seed=seed, where=config.name))
    return (
        [row for index, row in enumerate(train) if index not in held],
        [row for index, row in enumerate(train) if index in held],
    )


def fetch(name: str, *, subset: str | None, revision: str | None) -> Mapping[str, Any]:
    """All splits of a data set on the hub, downloaded once into the cache of `datasets`.

    Raises:
        DataError: When the name is unknown or the hub cannot be reached.
    """
    from datasets import load_dataset

    try:
        parts: Mapping[str, Any] = load_dataset(name, subset, revision=revision)
    # Named fault boundary: network, hub and parsers raise errors of many classes.
    except Exception as error:
        raise DataError(
            f"the data set {name!r} cannot be fetched from the Hugging Face hub",
            expected="a public organization/name and a network, or a copy in the cache",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            fix="check the name, subset and revision; without a network, name a local file or "
            "folder instead (kind: file)",
        ) from error
    return parts


def records_of(dataset: Any) -> Records:
    """The rows of a `datasets.Dataset`, as plain values."""
    return [dict(record) for record in dataset]


def renamed(records: Records, names: Mapping[str, str]) -> Records:
    """Records with renamed columns."""
    if not names:
        return records
    return [
        {names.get(column, column): value for column, value in record.items()} for record in records
    ]


def _rows(config: HubData, parts: Mapping[str, Any], split: str) -> list[Row]:
    if split not in parts:
        raise DataError(
            f"the data set {config.name!r} has no split {split!r}",
            expected=f"one of {', '.join(parts)}",
            got=split,
            fix="correct data.train or data.validation",
        )
    where = f"the split {split} of {config.name}"
    return recognise(
        renamed(records_of(parts[split]), config.rename), where=where, task=config.name
    )
