"""Rows from the Hugging Face hub, and from `datasets.Dataset` objects."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.data import HubData
from nemo_rl_core.data.datasets.formats import Recognised, recognise
from nemo_rl_core.data.datasets.parts import Parts, without_validation
from nemo_rl_core.errors import DataError

Records = list[dict[str, Any]]


def load(config: HubData, *, seed: int) -> Parts:
    """Training rows and validation rows of a data set on the hub.

    Args:
        config: The data set's name and splits, and how its columns are read.
        seed: For held-out rows, if the config has no validation split.

    Raises:
        DataError: When it cannot be fetched, has no such split, or is in no known format.
    """
    splits = fetch(config.name, subset=config.subset, revision=config.revision)
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


def _rows(config: HubData, parts: Mapping[str, Any], split: str) -> Recognised:
    if split not in parts:
        raise DataError(
            f"the data set {config.name!r} has no split {split!r}",
            expected=f"one of {', '.join(parts)}",
            got=split,
            fix="correct data.train or data.validation",
        )
    where = f"the split {split} of {config.name}"
    return recognise(records_of(parts[split]), where=where, task=config.name, form=config.reading())
