"""Algorithms by name."""

from typing import Any

from nemo_rl_core.registry import Registry
from nemo_rl_core.trainers.base import BaseTrainer

_ALGORITHM_REGISTRY: Registry[BaseTrainer[Any, Any]] = Registry(
    "algorithm",
    {
        "sft": "nemo_rl_core.algorithms.sft.trainer:SFTTrainer",
        "dpo": "nemo_rl_core.algorithms.dpo.trainer:DPOTrainer",
        "reward_model": "nemo_rl_core.algorithms.reward_model.trainer:RewardModelTrainer",
        "grpo": "nemo_rl_core.algorithms.grpo.trainer:GRPOTrainer",
        "async_grpo": "nemo_rl_core.algorithms.grpo.asynchronous:AsyncGRPOTrainer",
        "ppo": "nemo_rl_core.algorithms.ppo.trainer:PPOTrainer",
        "distillation": "nemo_rl_core.algorithms.distillation.trainer:DistillationTrainer",
    },
)
register_algorithm = _ALGORITHM_REGISTRY.register
"""Registers a trainer class under a name: a decorator."""
get_algorithm = _ALGORITHM_REGISTRY.get
"""The trainer class of a name; an unknown name raises `ConfigError` with the choices."""
