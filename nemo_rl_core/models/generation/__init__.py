"""Generation engines that run in Ray workers.

The names below are imported on first access, like those of `nemo_rl_core`.
"""

from typing import Any

_PUBLIC = {
    "Generation": ".engine",
    "GenerationInterface": ".interfaces",
    "HuggingFaceGeneration": ".pretrained",
    "MegatronGeneration": ".pretrained",
    "VllmConfig": ".vllm",
    "VllmGeneration": ".vllm",
    "VllmGenerationWorker": ".vllm",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
