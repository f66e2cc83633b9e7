"""Training and generation backends: plain classes, found by name, one instance a rank."""

# Relative on purpose: a stage's source digest follows absolute imports, and these two name every
# backend there is: what trains without an engine must not run again for another engine.
from .generation.base import get_generation_backend, register_generation_backend
from .training.base import get_training_backend, register_training_backend

__all__ = [
    "get_generation_backend",
    "get_training_backend",
    "register_generation_backend",
    "register_training_backend",
]
