"""Checks for batches that the data cannot fill, and for runs that take hours on a laptop."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.data import DataConfig, FileData
from nemo_rl_core.config.model import ModelConfig, PretrainedModel, SmallModel
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.errors import ConfigError, NemoRLError
from nemo_rl_core.planning.cpu_hours import hours_warning
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.store import remote
from nemo_rl_core.types import Row
from tasks.planning.gpu_plan import config_of
from tasks.planning.loads import loads_of, steps_of
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.pairs import PairsFromRollouts

_LOG = logging.getLogger(__name__)
MOST_BYTES_READ: Final = 64 * 2**20
"""Larger files take longer to read than a user would wait before a run starts."""
_TOY: Final = 1_000_000
"""Layers times the square of the hidden size: smaller models do not take hours."""
_PAIRS: Final = "num_pairs_per_step"


def check_size(experiment: PipelineRecipe) -> None:
    """Refuses steps of more rows than the data has, and warns of hours on a CPU."""
    batches = _batches(experiment)
    num_rows = _num_rows(experiment.data) if batches else None
    if num_rows:  # the stage that reads the rows refuses an empty set
        _refuse_large(batches, num_rows)
    if batches and not experiment.cluster.num_gpus:
        _warn_of_hours(experiment, num_rows)


def _batches(experiment: PipelineRecipe) -> dict[str, int]:
    samples_pairs = isinstance(getattr(experiment, "pairs", None), PairsFromRollouts)
    sections = (
        (name, algorithm.rows_per_step, getattr(experiment, name, None))
        for name, algorithm in ALGORITHMS.items()
    )
    return {
        f"{name}.{field}": getattr(config, field)
        for name, field, config in sections
        if config is not None and not (samples_pairs and field == _PAIRS)
    }


def _refuse_large(batches: Mapping[str, int], num_rows: int) -> None:
    too_large = {name: size for name, size in batches.items() if size > num_rows}
    if too_large:
        raise ConfigError(
            "a step takes more rows than the data has",
            expected=f"{' and '.join(too_large)} of at most {num_rows}, the rows to train on",
            got=", ".join(map(str, too_large.values())),
            fix="lower the setting, or use more data",
        )


def _warn_of_hours(experiment: PipelineRecipe, num_rows: int | None) -> None:
    if not _is_sized(experiment.model):
        return
    row_characters = None
    if isinstance(experiment.data, FileData) and num_rows:
        row_characters = bytes_of([experiment.data.train]) / num_rows
    try:
        loads = loads_of(experiment, lambda model: sizes_of(config_of(model)))
    except NemoRLError as error:
        _LOG.debug("the time was not estimated: %s", error.in_one_line)
        return
    steps = steps_of(experiment)
    for load in loads:
        text = hours_warning(load, steps.get(load.name, 0), row_characters=row_characters)
        if text:
            _LOG.warning("%s", text)


def _is_sized(model: ModelConfig) -> bool:
    """Whether the sizes are known immediately, and are not those of a toy model."""
    if isinstance(model, PretrainedModel):
        return Path(model.name).expanduser().is_dir()
    return isinstance(model, SmallModel) and model.num_layers * model.hidden_size**2 > _TOY


def _num_rows(data: DataConfig) -> int | None:
    """Returns the number of rows to train on; None if they cannot be counted immediately."""
    if not isinstance(data, FileData):
        return getattr(data, "num_train", None)
    if remote.is_remote(data.train) or bytes_of([data.train]) > MOST_BYTES_READ:
        return None
    with suppress(NemoRLError):  # the stage that reads the rows reports their problems
        return len(rows_to_check(data)[0])
    return None


def rows_to_check(data: DataConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Returns the rows of a data section without the log lines of reading them.

    The stage that prepares the rows writes these lines, once.
    """
    with reading_quietly():
        return load_rows(data, seed=0)


@contextmanager
def reading_quietly() -> Iterator[None]:
    """Suppresses the log lines of reading rows."""
    reading = logging.getLogger("nemo_rl_core.data")
    level = reading.level
    reading.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reading.setLevel(level)


def bytes_of(names: Sequence[str]) -> int:
    """Returns the bytes of local files, and of those in local folders."""
    paths = [Path(name).expanduser() for name in names]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())
