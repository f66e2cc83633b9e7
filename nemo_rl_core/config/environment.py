"""How a completion is scored."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from nemo_rl_core.config.base import FrozenConfig


class ExactMatch(FrozenConfig):
    """1.0 when the completion, stripped, equals the answer."""

    kind: Literal["exact"] = "exact"


class MathVerify(FrozenConfig):
    """1.0 when math-verify finds the completion's final answer equal to the reference."""

    kind: Literal["math"] = "math"
    timeout_seconds: PositiveFloat = 5.0


class ReasoningGymScore(FrozenConfig):
    """The score of the reasoning-gym task that made the prompt, between 0 and 1."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class RewardFunction(FrozenConfig):
    """Your own function `(prompt, response) -> float`, or of two lists, named `module:function`."""

    kind: Literal["function"] = "function"
    target: str = Field(pattern=r"^[\w.]+:\w+$")


EnvironmentConfig = Annotated[
    ExactMatch | MathVerify | ReasoningGymScore | RewardFunction, Field(discriminator="kind")
]
