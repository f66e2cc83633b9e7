"""The controller's side of policies and generation, which drives worker groups.

The names below are imported on first access, like those of `nemo_rl_core`.
"""

from typing import Any

_PUBLIC = {
    "GenerationInterface": ".interfaces",
    "HuggingFaceGeneration": ".generation",
    "HuggingFacePolicy": ".policy.pretrained",
    "MegatronGeneration": ".generation",
    "MegatronPolicy": ".policy.pretrained",
    "Policy": ".policy.lm_policy",
    "PolicyInterface": ".interfaces",
    "VllmGeneration": ".generation",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
