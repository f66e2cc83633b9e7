"""Post-training of language models: algorithms, backends, data, and what they share.

The names below are imported on first use (PEP 562), so that importing the package, which every
stage of a pipeline does, loads neither torch nor Ray.
"""

import os
from pathlib import Path
from typing import Any

from nemo_rl_core.documented_names import install
from nemo_rl_core.errors import ConfigError

_PUBLIC = {
    "train": ".api.train",
    "runs": ".api.frames",
    "run_metrics": ".api.frames",
    "run_rollouts": ".api.frames",
    "register_algorithm": ".api.functional",
    "get_algorithm": ".api.functional",
    "BaseTrainer": ".trainers.base",
    "Callback": ".trainers.callbacks",
    "EarlyStopping": ".trainers.callbacks",
    "TrainResult": ".trainers.fit.fitting",
    "DataModule": ".data.module",
    "check_loss": ".functional.loss_check",
    "DPOTrainer": ".algorithms.dpo.trainer",
    "DistillationTrainer": ".algorithms.distillation.trainer",
    "AsyncGRPOTrainer": ".algorithms.grpo.asynchronous",
    "GRPOTrainer": ".algorithms.grpo.trainer",
    "PPOTrainer": ".algorithms.ppo.trainer",
    "RewardModelTrainer": ".algorithms.reward_model.trainer",
    "SFTTrainer": ".algorithms.sft.trainer",
    "DPOConfig": ".algorithms.dpo.config",
    "DistillationConfig": ".algorithms.distillation.config",
    "GRPOConfig": ".algorithms.grpo.config",
    "PPOConfig": ".algorithms.ppo.config",
    "RewardModelConfig": ".algorithms.reward_model.config",
    "SFTConfig": ".algorithms.sft.config",
}
_TRL_EQUIVALENTS = {
    "RLOOTrainer": 'train(..., algorithm="rloo")',
    "RLOOConfig": "GRPOConfig(preset='rloo')",
    "RewardTrainer": "RewardModelTrainer",
    "RewardConfig": "RewardModelConfig",
    "KTOTrainer": "DPOTrainer with loss={'kind': 'kto'}",
    "KTOConfig": "DPOConfig(loss={'kind': 'kto'})",
    "ORPOTrainer": "DPOTrainer with loss={'kind': 'orpo'}",
    "ORPOConfig": "DPOConfig(loss={'kind': 'orpo'})",
    "CPOTrainer": "DPOTrainer with loss={'kind': 'simpo'}",
    "CPOConfig": "DPOConfig(loss={'kind': 'simpo'})",
    "GKDTrainer": "DistillationTrainer",
    "GKDConfig": "DistillationConfig",
    "ScriptArguments": "the arguments of train()",
    "ModelConfig": "the model's name, or a class of nemo_rl_core.config.model",
    "LoraConfig": "training={'lora': {'rank': 16, 'alpha': 32.0}}",
    "TrainerCallback": "Callback",
}
"""Classes of TRL and their equivalents here."""
__all__ = list(_PUBLIC)

# An isolated worker would import the project's packages on a machine without its folder.
_packages = os.environ.get("NEMO_RL_ISOLATED_PACKAGES")
if _packages is not None and not Path(_packages).is_dir():
    raise ConfigError(
        f"the packages of an isolated worker are missing on {os.uname().nodename}",
        expected=f"the folder {_packages}",
        fix="use a folder, or a store (NEMO_RL_HOME), that all machines share",
    )

install()


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    if name in _TRL_EQUIVALENTS:
        # Not AttributeError, whose text Python drops for `from nemo_rl_core import NAME`.
        raise ImportError(f"{__name__} has no {name}; here it is {_TRL_EQUIVALENTS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
