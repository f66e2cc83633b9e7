"""Whether trainer and rollout engine agree on the probability of the same tokens."""

from nemo_rl_core.models.validation.gate import check_consistency

__all__ = ["check_consistency"]
