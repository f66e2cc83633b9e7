"""Drawings of NeMo RL's documents: their names exist, and what they connect is connected."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nemo_rl_core
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.callbacks import Callback
from tests.reference.code_blocks import source
from tests.unit.trainers.test_own_policy import ROWS, CustomPolicy

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = {
    "BaseTrainer": "trainers.base",
    "CheckpointManager": "infra.checkpointing",
    "DPOTrainer": "",
    "DataModule": "",
    "Environment": "environments.interfaces:EnvironmentInterface",
    "GRPOTrainer": "",
    "GenerationBackend": "backends.generation.base",
    "GenerationPolicy": "models.policy",
    "LoggerFacade": "infra.logging",
    "PolicyWorkers": "models.policy",
    "ResourceManager": "infra.resources",
    "RolloutEngine": "algorithms.rollout",
    "SFTTrainer": "",
    "TrainResult": "",
    "Trainer.from_pretrained": "trainers.base:BaseTrainer.from_pretrained",
    "TrainingBackend": "backends.training.base",
    "TrainingPolicy": "models.policy",
    "nemo_rl_core.train": ":train",
}
"""The module of each name in the drawings, and its name there if that differs."""

PACKAGES = {
    "Configuration_System_Orchestration": {"config", "distributed", "registry"},
    "Data_Pipeline": {"data", "games"},
    "RL_Algorithm_Engine": {"algorithms", "trainers", "api"},
    "Policy_Model_Backends": {"models", "backends", "model_files"},
    "Experience_Generation_Environments": {"rollouts", "environments"},
    "Evaluation_Observability": {"evals", "telemetry", "checkpoints", "store", "history"},
}
"""The packages of each component of document 003."""

GIVES = ("Configures", "Manages", "Provides", "Receives")
"""First words of arrows whose end imports their start; for others the start imports the end."""


@pytest.mark.parametrize("drawing", ["002_L020", "002_L128", "002_L162"])
def test_the_names_of_a_drawing_exist(drawing: str) -> None:
    text = re.sub(r"#.*", "", source(drawing))
    named = [name for name in PLACES if re.search(rf"(?<![\w.]){re.escape(name)}\b", text)]
    assert len(named) >= 3
    for name in named:
        module, _, attribute = PLACES[name].partition(":")
        value: Any = importlib.import_module(f"nemo_rl_core.{module}".rstrip("."))
        for part in (attribute or name).split("."):
            value = getattr(value, part)
    capitals = set(re.findall(r"\b(?:[A-Z]+[a-z]+[A-Z]\w+|[a-z]+_rl\w*\.train)\b", text))
    # The two backends are in test_documented_names.py.
    assert capitals <= {*PLACES, "DTensor", "HuggingFace"}


@cache
def imported_packages(package: str) -> set[str]:
    folder = REPOSITORY / "nemo_rl_core" / package
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return {
        name
        for file in files
        for name in re.findall(r"(?m)^\s*from nemo_rl_core\.(\w+)", file.read_text())
    }


def test_components_are_connected_as_drawn() -> None:
    arrows = re.findall(r'(\w+) -- "(\w+)[^"]*" --> (\w+)', source("003_L001"))
    assert len(arrows) == 19
    missing = []
    for start, verb, end in arrows:
        importing, imported = (end, start) if verb in GIVES else (start, end)
        reached = {name for package in PACKAGES[importing] for name in imported_packages(package)}
        if not reached & PACKAGES[imported]:
            missing.append((start, verb, end))
    assert missing == []


class _Events(Callback):
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_fit_begin(self, trainer: Any) -> None:
        self.names.append("fit")

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        self.names.append("epoch")

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.names.append("step")

    def on_epoch_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
        self.names.append("epoch end")

    def on_fit_end(self, trainer: Any) -> None:
        self.names.append("end")


@pytest.mark.slow
def test_train_goes_through_the_drawn_steps(tiny_model: Path) -> None:
    with pytest.raises(ConfigError):  # inputs are validated before anything is created
        nemo_rl_core.train(model="there/is/no/model", dataset=ROWS, algorithm="grpoo")
    events = _Events()
    options = {"num_steps": 4, "global_batch_size": 20, "callbacks": [events]}
    result = nemo_rl_core.train(
        model=CustomPolicy(str(tiny_model)), dataset=ROWS, algorithm="sft", **options
    )
    epoch = ["epoch", "step", "step", "epoch end"]
    assert events.names == ["fit", *epoch, *epoch, "end"]
    assert isinstance(result, nemo_rl_core.TrainResult)
