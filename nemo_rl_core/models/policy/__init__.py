"""The controller's side of a model in training, and the short forms that make one."""

from nemo_rl_core.models.policy.lm_policy import Policy

__all__ = ["Policy"]
