"""Settings of the export of a training pipeline."""

from typing import Literal

from nemo_rl_core.config.base import FrozenConfig


class ExportConfig(FrozenConfig):
    """Model that a training pipeline exports.

    Attributes:
        model: `trained` exports the model at the end of training, regardless of the verdict;
            `promoted` exports it only if it was promoted, otherwise the initial model.
    """

    model: Literal["trained", "promoted"] = "trained"
