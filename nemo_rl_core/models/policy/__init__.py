"""The controller's side of a model in training, and policies made from the name of a model."""

from typing import Any

from nemo_rl_core.documented_names import documented
from nemo_rl_core.models.policy.lm_policy import Policy

__all__ = ["Policy"]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
