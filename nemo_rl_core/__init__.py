"""Post-training of language models: algorithms, backends, data, and what they share.

The names below are imported when first asked for (PEP 562), so that importing the package, which
every stage of a pipeline does, loads neither torch nor Ray.
"""

from typing import Any

from nemo_rl_core.documented_names import install

_PUBLIC = {
    "train": ".api.train",
    "register_algorithm": ".api.functional",
    "get_algorithm": ".api.functional",
    "BaseTrainer": ".trainers.base",
    "Callback": ".trainers.callbacks",
    "TrainResult": ".trainers.fitting",
    "DataModule": ".data.module",
    "DPOTrainer": ".algorithms.dpo.trainer",
    "DistillationTrainer": ".algorithms.distillation.trainer",
    "AsyncGRPOTrainer": ".algorithms.grpo.asynchronous",
    "GRPOTrainer": ".algorithms.grpo.trainer",
    "PPOTrainer": ".algorithms.ppo.trainer",
    "RewardModelTrainer": ".algorithms.reward_model.trainer",
    "SFTTrainer": ".algorithms.sft.trainer",
}
__all__ = list(_PUBLIC)

install()


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
