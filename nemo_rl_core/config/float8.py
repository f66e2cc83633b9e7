"""The recipes of training in float8, and what they need."""

from importlib.util import find_spec
from typing import Literal

from nemo_rl_core.errors import ResourceError

Float8Recipe = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Under torchao's names."""


def require_torchao(recipe: str) -> None:
    """Raises if torchao is missing where a recipe needs it.

    Raises:
        ResourceError: Says how to get it.
    """
    if recipe != "none" and find_spec("torchao") is None:
        raise ResourceError(
            f"training.float8: {recipe} needs the package torchao",
            expected="torchao 0.18, which the requirements for GPUs have",
            got="no such package",
            fix="pip install --no-deps torchao==0.18.0, or leave training.float8 out",
        )
