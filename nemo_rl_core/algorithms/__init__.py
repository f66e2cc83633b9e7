"""One folder per algorithm: `config.py`, `loss.py`, `data.py` and `trainer.py` as needed.

No algorithm imports another. The table from names to trainers is in `nemo_rl_core.api.functional`.
"""

from typing import Any

_PUBLIC = {
    "AsyncGRPOTrainer": ".grpo.asynchronous",
    "DPOLossFn": ".dpo.loss",
    "DPOTrainer": ".dpo.trainer",
    "DistillationLossFn": ".distillation.loss",
    "DistillationTrainer": ".distillation.trainer",
    "GRPOLossFn": ".grpo.loss",
    "GRPOTrainer": ".grpo.trainer",
    "NLLLoss": ".sft.loss",
    "PPOLossFn": ".ppo.loss",
    "PPOTrainer": ".ppo.trainer",
    "PreferenceLossFn": ".reward_model.loss",
    "RewardModelTrainer": ".reward_model.trainer",
    "SFTLossFn": ".sft.loss",
    "SFTTrainer": ".sft.trainer",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
