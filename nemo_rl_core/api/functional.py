"""Algorithms by name."""

from typing import Any

from nemo_rl_core.registry import Registry
from nemo_rl_core.trainers.base import BaseTrainer

_ALGORITHM_REGISTRY: Registry[BaseTrainer[Any, Any]] = Registry(
    "algorithm",
    {
        "sft": "nemo_rl_core.algorithms.sft.trainer:SFTTrainer",
        "grpo": "nemo_rl_core.algorithms.grpo.trainer:GRPOTrainer",
    },
)
register_algorithm = _ALGORITHM_REGISTRY.register
get_algorithm = _ALGORITHM_REGISTRY.get
