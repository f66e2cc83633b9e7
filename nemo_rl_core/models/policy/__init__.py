"""The controller's side of a model in training, and policies by the name of their model."""

from nemo_rl_core.models.policy.lm_policy import Policy

__all__ = ["Policy"]
