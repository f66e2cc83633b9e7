"""Readers of rows, one a file, each found by the `kind` of its config."""

from nemo_rl_core.config.data import ArithmeticData, DataConfig, FileData, ReasoningGymData
from nemo_rl_core.types import Row


def load_rows(config: DataConfig, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to validate on."""
    match config:
        case ArithmeticData():
            from nemo_rl_core.data.datasets import arithmetic

            return arithmetic.load(config, seed=seed)
        case ReasoningGymData():
            from nemo_rl_core.data.datasets import reasoning_gym

            return reasoning_gym.load(config, seed=seed)
        case FileData():
            from nemo_rl_core.data.datasets import files

            return files.load(config)
