"""Resolved values of `auto` in the settings that workers get."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.algorithms.sft.config import SFTSettings
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.models.policy.choices import with_choices
from nemo_rl_core.planning.choices import chosen
from nemo_rl_core.trainers.gpu_load import load_of_trainer
from nemo_rl_core.trainers.loop import RunSpec
from tests.unit.planning.layouts import CONFIGS

H100 = 79.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIGS["qwen2.5-7b"].read_text())
    return tmp_path


def cluster_of(*bundles: int) -> Any:
    return SimpleNamespace(bundle_ct_per_node_list=list(bundles), world_size=sum(bundles))


def setup_of(folder: Path, **training: Any) -> TrainingSetup:
    return TrainingSetup(
        folder,
        OptimizerConfig(),
        max_tokens_per_microbatch=16384,
        training=DTensorTraining(**training),
        dtype="bfloat16",
    )


def test_workers_get_no_auto_and_the_manifest_records_the_choices(folder: Path) -> None:
    setup, choices = with_choices(setup_of(folder), cluster_of(8), memory_gib=H100)
    assert isinstance(setup.training, DTensorTraining)
    assert setup.training.activation_checkpointing is True
    assert choices == {
        "training.data_parallel_replicas": "1",
        "training.gradient_sync": "last_microbatch",
        "training.activation_checkpointing": "true",
    }
    assert with_choices(setup, cluster_of(8), memory_gib=H100) == (setup, {})


def test_each_of_two_machines_has_a_replica(folder: Path) -> None:
    choices = with_choices(setup_of(folder), cluster_of(8, 8), memory_gib=H100)[1]
    assert choices["training.data_parallel_replicas"] == "2"


def test_cpus_get_defaults_without_reading_sizes(tmp_path: Path) -> None:
    choices = with_choices(setup_of(tmp_path), cluster_of(2), memory_gib=None)[1]
    assert choices == {
        "training.data_parallel_replicas": "1",
        "training.gradient_sync": "every_microbatch",
        "training.activation_checkpointing": "false",
    }


def test_a_model_of_unknown_size_gets_defaults_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with caplog.at_level(logging.WARNING):
        choices = with_choices(setup_of(tmp_path), cluster_of(8), memory_gib=H100)[1]
    assert choices["training.activation_checkpointing"] == "false"
    assert "memory was not planned" in caplog.text


def test_a_trainer_requests_the_same_as_the_plan_of_its_stage(folder: Path) -> None:
    settings = GRPOSettings.model_validate(
        {
            "cluster": {"shape": "node_8gpu"},
            "dtype": "bfloat16",
            "grpo": {"loss": {"kl": {"beta": 0.1}}, "max_tokens_per_microbatch": 16384},
        }
    )
    spec = RunSpec(folder, folder, folder, reference=folder)
    load = load_of_trainer("grpo", settings.grpo, settings, spec)
    assert load is not None
    assert load.training is not None
    assert load.training.reference is not None
    assert load.sampling is not None
    assert (load.prompt_tokens, load.completion_tokens) == (
        settings.max_prompt_tokens,
        settings.max_rollout_tokens,
    )
    training = chosen(load, H100).training
    assert training is not None
    assert training.config.activation_checkpointing is True  # type: ignore[union-attr]


def test_a_trainer_counts_the_memory_of_scorers(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = {"kind": "model", "model": str(folder), "gpu_memory_utilization": 0.3}
    settings = GRPOSettings.model_validate(
        {
            "cluster": {"shape": "node_8gpu"},
            "environment": {
                "kind": "weighted_sum",
                "parts": [
                    {"environment": {"kind": "llm_judge", "judge": judge}},
                    {"environment": {"kind": "reward_model"}},
                ],
            },
        }
    )
    spec = RunSpec(folder, folder, folder, reward_model=folder)
    load = load_of_trainer("grpo", settings.grpo, settings, spec)
    assert load is not None
    assert [each.share for each in load.scorers] == [0.3, None]
    custom = replace(spec, scorer=object())  # type: ignore[arg-type]
    load = load_of_trainer("grpo", settings.grpo, settings, custom)
    assert load is not None
    assert not load.scorers
    of_hub = {"environment": {"kind": "reward_model", "model": "org/rm"}}
    settings = GRPOSettings.model_validate({"cluster": {"shape": "node_8gpu"}, **of_hub})
    with caplog.at_level(logging.WARNING):
        load = load_of_trainer("grpo", settings.grpo, settings, spec)
    assert load is not None
    assert not load.scorers
    assert "memory of the scorers was not planned" in caplog.text


def test_a_laptop_requests_nothing(folder: Path) -> None:
    settings = SFTSettings()
    assert load_of_trainer("sft", settings.sft, settings, RunSpec(folder, folder, folder)) is None
