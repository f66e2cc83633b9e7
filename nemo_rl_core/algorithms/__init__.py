"""One folder an algorithm: `config.py`, `loss.py`, `data.py` and `trainer.py`, as it needs them.

The table from names to trainers is in `nemo_rl_core.api.functional`: a stage that runs one
algorithm must not reach the others, or a change in one would run all of them again.
"""

from typing import Any

_TRAINERS = {
    "DPOTrainer": ".dpo.trainer",
    "DistillationTrainer": ".distillation.trainer",
    "GRPOTrainer": ".grpo.trainer",
    "PPOTrainer": ".ppo.trainer",
    "RewardModelTrainer": ".reward_model.trainer",
    "SFTTrainer": ".sft.trainer",
}
__all__ = list(_TRAINERS)


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:
        import importlib

        return getattr(importlib.import_module(_TRAINERS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
