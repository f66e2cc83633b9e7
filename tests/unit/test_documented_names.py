"""Every name exists in the module that the reference documents name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tasks
from nemo_rl_core.backends import BackendFactory
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.data import BatchedDataLoader
from nemo_rl_core.documented_names import MODULES, NAMES
from nemo_rl_core.environments import MathEnvironment
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import ConfigError, DataError, MissingColumnError
from nemo_rl_core.models.policy.reward_loss import as_rewards

PLACED = [
    ("", "train GRPOTrainer SFTTrainer DPOTrainer DataModule"),
    ("algorithms", "DPOTrainer DPOLossFn GRPOLossFn GRPOTrainer SFTTrainer"),
    ("algorithms.dpo", "setup dpo_train"),
    ("algorithms.rollout", "RolloutEngine"),
    ("backends", "get_training_backend get_generation_backend"),
    ("backends.factory", "BackendFactory"),
    ("backends.generation.base", "GenerationBackend register_generation_backend"),
    ("backends.generation.megatron", "MegatronInferenceBackend"),
    ("backends.generation.vllm", "VLLMBackend"),
    ("backends.training.base", "TrainingBackend register_training_backend"),
    ("backends.training.dtensor", "DTensorBackend"),
    ("backends.training.megatron", "MegatronBackend"),
    ("config.base", "BaseConfig"),
    ("config.cluster", "ClusterConfig"),
    ("config.policy", "PolicyConfig"),
    ("config.training", "GRPOConfig SFTConfig DPOConfig"),
    ("config.validation", "describe"),
    ("data.module", "DataModule"),
    ("data.module_hf", "HubData"),
    ("distributed", "RayVirtualCluster RayWorkerGroup BatchedDataDict"),
    ("distributed.virtual_cluster", "RayVirtualCluster"),
    ("environments", "FunctionalRewardWrapper MathEnvironment"),
    ("environments.functional_reward", "FunctionalRewardWrapper"),
    ("environments.interfaces", "EnvironmentInterface EnvironmentReturn"),
    ("environments.math_environment", "MathEnvironment"),
    ("experience.rollouts", "RolloutEngine"),
    ("infra.checkpointing", "CheckpointManager"),
    ("infra.logging", "LoggerFacade"),
    ("infra.resources", "ResourceManager"),
    ("models", "HuggingFacePolicy MegatronPolicy"),
    ("models.dtensor", "DTensorBackend"),
    ("models.generation", "VllmGeneration VllmConfig"),
    (
        "models.generation.interfaces",
        "GenerationInterface GenerationDatumSpec GenerationOutputSpec GenerationConfig",
    ),
    ("models.generation.vllm", "VllmGeneration VllmConfig VllmGenerationWorker"),
    ("models.interfaces", "PolicyInterface TrainingDatumSpec LogprobsSpec"),
    ("models.megatron", "MegatronBackend"),
    ("models.policy.generation_policy", "GenerationPolicy"),
    ("models.policy.lm_policy", "Policy"),
    ("models.policy.training_policy", "TrainingPolicy PolicyWorkers"),
    ("models.validation", "validate_log_probability_consistency"),
    ("trainers.base", "BaseTrainer"),
    ("trainers.callbacks", "Callback"),
    ("trainers.validation", "ValidationRunner"),
    ("utils.checkpoint", "CheckpointManager"),
    ("utils.config", "BaseConfig"),
    ("utils.logger", "LoggerFacade"),
    ("utils.native_checkpoint", "save_tensors"),
]


@pytest.mark.parametrize(("module", "names"), PLACED, ids=[module or "." for module, _ in PLACED])
def test_a_module_of_the_documents_has_its_names(module: str, names: str) -> None:
    imported = importlib.import_module(f"nemo_rl_core.{module}".rstrip("."))
    for name in names.split():
        assert getattr(imported, name).__name__ is not None


def test_every_entry_of_the_table_resolves() -> None:
    for module, names in [*MODULES.items(), *NAMES.items()]:
        imported = importlib.import_module(f"nemo_rl_core.{module}")
        for name in names:
            assert getattr(imported, name) is not None, (module, name)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = imported.nothing


def test_names_are_imported_lazily() -> None:
    code = (
        "import sys, nemo_rl_core.utils.logger, nemo_rl_core.models.dtensor, nemo_rl_core.config\n"
        "assert not {'torch', 'ray', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_factory_makes_a_backend_by_name() -> None:
    assert isinstance(BackendFactory.training("dtensor"), DTensorBackend)
    with pytest.raises(ConfigError, match="no generation backend 'vlm'"):
        BackendFactory.generation("vlm")


@pytest.mark.slow
def test_mathematics_is_an_environment() -> None:
    environment = MathEnvironment()
    try:
        logs = [[{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "It is 4"}]]
        played = environment.step(logs, [{"answer": "4"}])
        assert isinstance(played, EnvironmentReturn)
        assert played.rewards.tolist() == [1.0]
        assert played.terminateds.tolist() == [True]
        generations = {"completions": ["4", "5"], "answer": ["4", "4"]}
        rewards = environment.step(generations)
        assert isinstance(rewards, torch.Tensor)
        assert rewards.tolist() == [1.0, 0.0]
        _, metrics = environment.global_post_process_and_metrics({"rewards": rewards})
        assert metrics == {"accuracy": 0.5}
    finally:
        environment.close()


def test_rows_are_split_into_batches() -> None:
    rows = [{"input_ids": [1] * length, "answer": str(length)} for length in (2, 3, 1)]
    loader = BatchedDataLoader(rows, batch_size=2)
    first, last = loader
    assert len(loader) == 2
    assert first["input_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert (last["input_lengths"].tolist(), last["answer"]) == ([1], ["1"])
    with pytest.raises(DataError, match="a row has no tokens"):
        list(BatchedDataLoader([{"prompt": "2+2="}]))


def test_rewards_stand_in_for_a_loss() -> None:
    assert as_rewards(lambda *_: None, num_rows=2) is None
    rewards = as_rewards([1.0, 0.0], num_rows=2)
    assert rewards is not None
    assert rewards.tolist() == [1.0, 0.0]
    with pytest.raises(DataError, match="one reward per row"):
        as_rewards(torch.zeros(3), num_rows=2)


def test_a_batch_without_texts_is_refused_by_name() -> None:
    from nemo_rl_core.distributed import BatchedDataDict

    with pytest.raises(MissingColumnError, match="'answer'"):
        MathEnvironment().step(BatchedDataDict({"completions": ["4"]}))


def test_importing_tasks_loads_no_large_module() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tasks; import nemo_rl_core.utils\n"
        "large = {'importlib.abc', 'tempfile', 'typing_extensions', 'pydantic', 'torch'}\n"
        "assert not large & sys.modules.keys(), large & sys.modules.keys()"
    )
    root = str(Path(tasks.__file__).parents[1])
    subprocess.run([sys.executable, "-I", "-S", "-c", code, root], check=True)
