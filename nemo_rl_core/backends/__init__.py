"""Training and generation backends: plain classes, selected by name, one instance per rank."""

from typing import Any

from nemo_rl_core.backends.generation.base import (
    get_generation_backend,
    register_generation_backend,
)
from nemo_rl_core.backends.training.base import get_training_backend, register_training_backend
from nemo_rl_core.documented_names import documented

__all__ = [
    "get_generation_backend",
    "get_training_backend",
    "register_generation_backend",
    "register_training_backend",
]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
