"""Data set readers, selected by the `kind` of the config."""

from collections.abc import Sequence

from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.config.generated_data import (
    ArithmeticData,
    GuessNumberData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.data.datasets.generated import (
    arithmetic_rows,
    guess_number_rows,
    reasoning_gym_rows,
    sliding_puzzle_rows,
)
from nemo_rl_core.data.datasets.parts import Parts, Recognized
from nemo_rl_core.types import Row


def load_rows(config: DataConfig, *, seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Returns the training and validation rows of `load_parts`."""
    parts = load_parts(config, seed=seed)
    return parts.train, parts.validation or []


def load_parts(config: DataConfig, *, seed: int) -> Parts:
    """Returns training and validation rows, which depend only on the arguments.

    Args:
        seed: Seed of generated, held-out and drawn rows; files that are read in full ignore it.
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
        case ArithmeticData():
            rows = arithmetic_rows(config, seed=seed)
        case ReasoningGymData():
            rows = reasoning_gym_rows(config, seed=seed)
        case SlidingPuzzleData():
            rows = sliding_puzzle_rows(config, seed=seed)
        case GuessNumberData():
            rows = guess_number_rows(config, seed=seed)
    return Parts(*rows)


def recognized_validation(config: DataConfig, *, seed: int) -> Recognized:
    """Returns the validation rows of `load_parts`, without reading separate training data."""
    if isinstance(config, FileData) and config.validation is not None:
        from nemo_rl_core.data.datasets import files

        return files.read_split(config, config.validation)
    if isinstance(config, HubData) and config.validation is not None:
        from nemo_rl_core.data.datasets import hub

        return hub.read_validation(config)
    parts = load_parts(config, seed=seed)
    return Recognized(parts.validation or [], parts.read_as)
