"""Data set readers, one per file, selected by the `kind` of the config."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.config.generated_data import (
    ArithmeticData,
    GuessNumberData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.data.datasets.parts import Parts
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    from nemo_rl_core.data.datasets.formats import Recognised


def load_rows(config: DataConfig, *, seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Returns training and validation rows, as `load_parts` does."""
    parts = load_parts(config, seed=seed)
    return parts.train, parts.validation or []


def load_parts(config: DataConfig, *, seed: int) -> Parts:
    """Returns training and validation rows, which depend on the arguments alone.

    Args:
        config: The data section of a recipe.
        seed: For generated, held-out and drawn rows; files that are all read do not depend on it.

    Raises:
        DataError: When the rows cannot be read or generated.
    """
    match config:
        case FileData():
            from nemo_rl_core.data.datasets import files

            return files.load(config, seed=seed)
        case HubData():
            from nemo_rl_core.data.datasets import hub

            return hub.load(config, seed=seed)
        case MixtureData():
            from nemo_rl_core.data.datasets import mixture

            return mixture.load(config, load_parts, seed=seed)
        case _:
            return Parts(*_generated(config, seed=seed))


def load_validation(config: DataConfig, *, seed: int) -> Sequence[Row]:
    """Returns the validation rows of `load_parts`, as `recognised_validation` does."""
    return recognised_validation(config, seed=seed).rows


def recognised_validation(config: DataConfig, *, seed: int) -> "Recognised":
    """Returns the validation rows of `load_parts`; named training data beside them is not read.

    Args:
        config: The data section of a recipe.
        seed: For generated and held-out rows.

    Raises:
        DataError: When the rows cannot be read or generated.
    """
    from nemo_rl_core.data.datasets.formats import Recognised

    if isinstance(config, FileData) and config.validation is not None:
        from nemo_rl_core.data.datasets import files

        return files.read_split(config, config.validation)
    if isinstance(config, HubData) and config.validation is not None:
        from nemo_rl_core.data.datasets import hub

        return hub.read_validation(config)
    parts = load_parts(config, seed=seed)
    return Recognised(parts.validation or [], parts.read_as)


def _generated(
    config: ArithmeticData | ReasoningGymData | SlidingPuzzleData | GuessNumberData, *, seed: int
) -> tuple[list[Row], list[Row]]:
    match config:
        case ArithmeticData():
            from nemo_rl_core.data.datasets import arithmetic

            return arithmetic.load(config, seed=seed)
        case ReasoningGymData():
            from nemo_rl_core.data.datasets import reasoning_gym

            return reasoning_gym.load(config, seed=seed)
        case SlidingPuzzleData():
            from nemo_rl_core.data.datasets import sliding_puzzle

            return sliding_puzzle.load(config, seed=seed)
        case GuessNumberData():
            from nemo_rl_core.data.datasets import guess_number

            return guess_number.load(config, seed=seed)
