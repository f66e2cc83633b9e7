"""The KL penalty in the reward, which GRPO and PPO share."""

from typing import Literal

from pydantic import NonNegativeFloat, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError


class KLInReward(FrozenConfig):
    """`beta` times an estimate of the KL to the reference policy, subtracted from the reward.

    The estimate is computed once per step, between the policy that the step starts with and the
    reference, with `d = ref - cur` clipped to +-20 and the estimate to +-10. The policy gradient
    treats it like any reward. So only k1, `-d` (InstructGPT, arXiv:2203.02155, section 3.5), has
    the gradient of `KL(policy || reference)`. k2, `d^2 / 2`, and k3, `e^d - 1 - d`, also
    lower the reward of tokens that are rarer than in the reference, and may push away from it.

    Attributes:
        place: Where the penalty is applied: it is subtracted from the reward.
        kind: The estimator.
        beta: Weight of the penalty.
        allow_biased_gradient: Whether to accept k2 and k3, whose gradient is not that of the KL.
    """

    place: Literal["in_reward"] = "in_reward"
    kind: Literal["k1", "k2", "k3"] = "k1"
    beta: NonNegativeFloat = 0.01
    allow_biased_gradient: bool = False

    @model_validator(mode="after")
    def _gradient_is_that_of_the_kl(self) -> "KLInReward":
        if self.kind == "k1" or self.allow_biased_gradient:
            return self
        raise ConfigError(
            f"the estimator {self.kind} in the reward does not have the gradient of the KL",
            expected="kl.kind k1, whose gradient in the reward is that of the KL",
            got=self.kind,
            fix="set kl.kind to k1, set kl.allow_biased_gradient to true, or, in GRPO, use "
            "kl.place in_loss, where every kind has the gradient of the KL",
        )
