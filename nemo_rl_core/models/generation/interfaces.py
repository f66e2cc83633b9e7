"""Interface of generation engines, which custom classes may implement."""

from typing import Any

from nemo_rl_core.documented_names import documented
from nemo_rl_core.models.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
)

__all__ = ["GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec"]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
