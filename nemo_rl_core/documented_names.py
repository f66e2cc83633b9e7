"""Aliases for the module names of NeMo RL's documents, which the project itself does not use."""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from nemo_rl_core.deprecations import MOVED, moved

_PREFIX: Final = "nemo_rl_core."

_CHECKPOINTS = {
    "CheckpointManager": "checkpoints.manager:CheckpointManager",
    "save_atomic": "checkpoints.manager:save_atomic",
}
_CONFIGS = {
    "BaseConfig": "config.base:FrozenConfig",
    "ClusterConfig": "config.cluster:ClusterConfig",
    "ModelConfig": "config.model:ModelConfig",
    "PolicyConfig": "models.policy.options:PolicyOptions",
    "OptimizerConfig": "config.optimizer:OptimizerConfig",
    "TrainingConfig": "config.training:TrainingConfig",
    "GenerationConfig": "config.generation:GenerationConfig",
}
_ENGINES = {
    "RolloutEngine": "rollouts.engine:RolloutEngine",
    "SingleTurnRollouts": "rollouts.engine:SingleTurnRollouts",
    "MultiTurnRollouts": "rollouts.multi_turn:MultiTurnRollouts",
}

MODULES: Final[dict[str, dict[str, str]]] = {
    "algorithms.rollout": _ENGINES,
    "config.policy": {"PolicyConfig": "models.policy.options:PolicyOptions"},
    "config.validation": {
        "describe": "config.mistakes:describe",
        "unknown_keys": "config.sections:unknown_keys",
    },
    "data.module_hf": {"HubData": "config.data:HubData", "DataModule": "data.module:DataModule"},
    "environments.functional_reward": {
        "FunctionalRewardWrapper": "environments.rewards.functional_reward:FunctionalRewardWrapper"
    },
    "experience": {},
    "experience.rollouts": _ENGINES,
    "infra": {},
    "infra.checkpointing": _CHECKPOINTS,
    "infra.logging": {"LoggerFacade": "telemetry.logger_facade:LoggerFacade"},
    "infra.resources": {"ResourceManager": "distributed.resources:ResourceManager"},
    "models.dtensor": {"DTensorBackend": "backends.training.dtensor.backend:DTensorBackend"},
    "models.megatron": {"MegatronBackend": "backends.training.megatron.backend:MegatronBackend"},
    "models.policy.generation_policy": {"GenerationPolicy": "models.generation.engine:Generation"},
    "models.policy.training_policy": {
        "TrainingPolicy": "models.policy.lm_policy:Policy",
        "PolicyWorkers": "distributed.worker_group:RayWorkerGroup",
    },
    "utils": {},
    "utils.checkpoint": _CHECKPOINTS,
    "utils.config": _CONFIGS,
    "utils.logger": {"LoggerFacade": "telemetry.logger_facade:LoggerFacade"},
    "utils.native_checkpoint": {
        **_CHECKPOINTS,
        "save_tensors": "checkpoints.tensors:save_tensors",
        "load_tensors": "checkpoints.tensors:load_tensors",
    },
}
"""Aliased modules below `nemo_rl_core`, with the target of each name."""

NAMES: Final[dict[str, dict[str, str]]] = {
    "backends": {"BackendFactory": "backends.factory:BackendFactory"},
    "backends.generation.megatron": {},
    "backends.generation.vllm": {"VLLMBackend": "backends.generation.vllm:VllmBackend"},
    "backends.training.dtensor": {
        "DTensorBackend": "backends.training.dtensor.backend:DTensorBackend"
    },
    "backends.training.megatron": {
        "MegatronBackend": "backends.training.megatron.backend:MegatronBackend"
    },
    "config": _CONFIGS,
    "config.base": {"BaseConfig": "config.base:FrozenConfig"},
    "config.training": {
        "GRPOConfig": "algorithms.grpo.config:GRPOConfig",
        "SFTConfig": "algorithms.sft.config:SFTConfig",
        "DPOConfig": "algorithms.dpo.config:DPOConfig",
        "OptimizerConfig": "config.optimizer:OptimizerConfig",
    },
    "data": {
        "BatchedDataLoader": "data.batched_loader:BatchedDataLoader",
        "DataModule": "data.module:DataModule",
    },
    "environments": {"MathEnvironment": "environments.math_environment:MathEnvironment"},
    "models.generation.interfaces": {"GenerationConfig": "models.generation.vllm:VllmConfig"},
    "models.policy": {
        "TrainingPolicy": "models.policy.lm_policy:Policy",
        "GenerationPolicy": "models.generation.engine:Generation",
        "PolicyWorkers": "distributed.worker_group:RayWorkerGroup",
        "HuggingFacePolicy": "models.policy.pretrained:HuggingFacePolicy",
        "MegatronPolicy": "models.policy.pretrained:MegatronPolicy",
    },
}
"""Additional names of existing modules, with the target of each name."""

_ALIASES: Final = {_PREFIX + key for key in MODULES} | MOVED.keys()


def documented(module: str, name: str) -> Any:
    """Resolves a documented name, for the `__getattr__` of a module (PEP 562).

    Raises:
        AttributeError: If the documents have no such name in the module.
    """
    key = module.removeprefix(_PREFIX)
    target = {**MODULES.get(key, {}), **NAMES.get(key, {})}.get(name)
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target_module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(_PREFIX + target_module), attribute)


class _Importer:
    """Creates the aliased modules, and those whose names have moved.

    It has no base class, since `importlib.abc` takes as long to import as this package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ALIASES:
            return None
        has_children = any(name.startswith(f"{fullname}.") for name in _ALIASES)
        return ModuleSpec(fullname, self, is_package=has_children)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to create the module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        resolve, names = (
            (moved, MOVED[name])
            if name in MOVED
            else (documented, MODULES[name.removeprefix(_PREFIX)])
        )
        module.__doc__ = f"Alias: see {__name__}."
        module.__getattr__ = partial(resolve, name)  # type: ignore[method-assign]
        vars(module)["__all__"] = list(names)


def install() -> None:
    """Makes aliased and moved modules importable; a second call does nothing."""
    if not any(isinstance(finder, _Importer) for finder in sys.meta_path):
        sys.meta_path.append(_Importer())
