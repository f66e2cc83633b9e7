"""Which model a training pipeline exports."""

from typing import Literal

from nemo_rl_core.config.base import FrozenConfig


class ExportConfig(FrozenConfig):
    """Which model a training pipeline exports.

    Attributes:
        model: `trained` exports the model at the end of training, whatever the verdict; `promoted`
            exports it only if it was promoted, and otherwise the model that training started from.
    """

    model: Literal["trained", "promoted"] = "trained"
