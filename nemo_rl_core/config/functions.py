"""Custom losses and advantages, which a section names by their module."""

from typing import Literal

from pydantic import Field

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.patterns import FUNCTION


class CustomFunction(FrozenConfig):
    """A custom function of a module.

    Attributes:
        target: The function, as `module:function`; the module is imported from the working folder
            or from an installed package.
        source: A digest of the module's source, which is part of the cache key. A run fills it in.
    """

    kind: Literal["function"] = "function"
    target: str = Field(pattern=FUNCTION)
    source: str = ""


class CustomLoss(CustomFunction):
    """A custom loss, with the signature of `LossFunction`."""


class CustomAdvantage(CustomFunction):
    """A custom function of rewards and other columns, which it names as its parameters."""
