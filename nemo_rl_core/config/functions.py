"""Custom losses and advantages, which a section names by their module."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.patterns import FUNCTION

FIELDS: Final = {"loss_fn": "loss", "advantage_fn": "advantage"}
"""Fields of an algorithm's section, by the argument in Python."""


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


def as_mapping(values: Any) -> Any:
    """Returns a config as a mapping, without a loss and an advantage that it does not set.

    Other values are kept; a mapping is copied.
    """
    if isinstance(values, BaseModel):
        return values.model_dump(exclude={*FIELDS.values()} - values.model_fields_set)
    return dict(values) if isinstance(values, Mapping) else values
