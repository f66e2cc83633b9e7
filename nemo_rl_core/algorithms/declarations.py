"""The built-in algorithms by name, in the order in which a pipeline trains with them."""

from collections.abc import Mapping
from typing import Final

from nemo_rl_core.algorithms.distillation.config import DistillationConfig
from nemo_rl_core.algorithms.dpo.config import DPOConfig
from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.algorithm import Algorithm

_CONFIGS = (SFTConfig, RewardModelConfig, DPOConfig, GRPOConfig, PPOConfig, DistillationConfig)

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    each.algorithm.name: each.algorithm for each in _CONFIGS
}
