"""The last lines of a run."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.evals.sweep import summarize
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry.console import program
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.types import StepReport
from tasks.artifacts import (
    Artifact,
    CheckpointArtifact,
    EvalReport,
    LineageReport,
    PromotionDecision,
    SweepReport,
)
from tasks.cli import COMMANDS
from tasks.local_run.closing import closing_lines

PROGRAM = Path(sys.executable).with_name("nemo-rl")


def make(kind: type[Artifact], folder: Path, stage: str, **fields: object) -> Artifact:
    shared = {"stage": stage, "content_hash": "ab" * 32}
    return kind(directory=FlyteDirectory(str(folder)), **shared, **fields)


def test_accuracy_decision_and_folders_are_printed(tmp_path: Path) -> None:
    figures = {
        "greedy_accuracy": 0.5,
        "greedy_accuracy_low": 0.25,
        "greedy_accuracy_high": 0.75,
        "num_prompts": 40.0,
    }
    sampled = {"pass_at_1": 0.5, "pass_at_1_low": 0.375, "pass_at_1_high": 0.625}
    sampled |= {"cons_at_4": 0.75, "cons_at_4_low": 0.5, "cons_at_4_high": 0.875}
    (tmp_path / "out").mkdir()
    origin = {"checkpoint": "ab" * 32, "exported": "the trained model (grpo_iteration 4)"}
    (tmp_path / "out" / "origin.json").write_text(json.dumps(origin))
    decision = {"promoted": True, "difference": 0.5, "low": 0.25, "high": 0.75}
    lines = closing_lines(
        [
            make(CheckpointArtifact, tmp_path / "sft", "train_sft"),
            make(EvalReport, tmp_path, "evaluate", metrics=figures, measured="train_sft"),
            make(
                EvalReport,
                tmp_path,
                "evaluate",
                metrics={**figures, "greedy_accuracy": 1, **sampled},
                measured="grpo_iteration 4",
            ),
            make(PromotionDecision, tmp_path, "promote", summary="promoted: +50.0", **decision),
            make(CheckpointArtifact, tmp_path / "out", "export"),
            make(LineageReport, tmp_path / "page", "lineage_report"),
        ]
    )
    model = tmp_path / "out" / "model"
    read = f"completions: {program()} eval {tmp_path}"
    assert lines[:7] == [
        "accuracy of train_sft: 0.500 [0.250, 0.750] on 40 held-out prompts, greedy",
        read,
        "accuracy of grpo_iteration 4: 1.000 [0.250, 0.750] on 40 held-out prompts, greedy",
        "sampled: pass@1 0.500 [0.375, 0.625], cons@4 0.750 [0.500, 0.875]",
        read,
        "promoted: +50.0",
        f"model: {model}",
    ]
    assert lines[7] == "exported: the trained model (grpo_iteration 4)"
    assert lines[8] == f"chat: {program()} chat {tmp_path / 'out'}"
    assert lines[9] == f"lineage: {tmp_path / 'page' / 'deck.html'}"
    assert len(lines) == 10


def test_the_trained_folder_is_printed_if_the_start_was_exported(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    origin = {"checkpoint": "cd" * 32, "exported": "the model that training started from (sft)"}
    (tmp_path / "out" / "origin.json").write_text(json.dumps(origin))
    trained = make(CheckpointArtifact, tmp_path / "grpo", "grpo_iteration 4")
    lines = closing_lines([trained, make(CheckpointArtifact, tmp_path / "out", "export")])
    assert lines[:3] == [
        f"model: {tmp_path / 'out' / 'model'}",
        "exported: the model that training started from (sft)",
        f"trained: {tmp_path / 'grpo' / 'model'}",
    ]


def test_a_reward_model_ends_with_its_accuracy(tmp_path: Path) -> None:
    figures = {"accuracy": 0.75, "accuracy_low": 0.5, "accuracy_high": 0.875, "num_pairs": 16.0}
    lines = closing_lines(
        [
            make(CheckpointArtifact, tmp_path, "train_reward_model"),
            make(EvalReport, tmp_path, "evaluate_reward_model", metrics=figures, measured="x"),
        ]
    )
    assert lines == [
        f"reward model: {tmp_path / 'model'}",
        "reward model's accuracy: 0.750 [0.500, 0.875] on 16 held-out pairs",
    ]


def test_a_run_without_questions_ends_with_its_measurements(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "sft").mkdir()
    origin = {"checkpoint": "ab" * 32, "exported": "the trained model (train_sft)"}
    (tmp_path / "out" / "origin.json").write_text(json.dumps(origin))
    file = MetricsFile(tmp_path / "sft" / "metrics.jsonl")
    file.append(StepReport("train_sft", 1, 2, {"loss": 3.0}))
    file.append(StepReport("train_sft", 2, 2, {"loss": 2.0, "validation_loss": 2.5}))
    trained = make(CheckpointArtifact, tmp_path / "sft", "train_sft")
    exported = make(CheckpointArtifact, tmp_path / "out", "export")
    assert closing_lines([trained, exported])[0] == "validation loss of train_sft: 2.500"
    figures = {"accuracy": 1.0, "accuracy_low": 0.5, "accuracy_high": 1.0, "num_pairs": 8.0}
    pairs = make(
        EvalReport,
        tmp_path,
        "evaluate_pairs",
        metrics={**figures, "margin": 1.25},
        measured="dpo_iteration 1",
    )
    assert closing_lines([trained, pairs, exported])[0] == (
        "pair accuracy of dpo_iteration 1: 1.000 [0.500, 1.000] on 8 held-out pairs, "
        "mean margin +1.250 nats"
    )


@pytest.mark.parametrize(("choices", "loss"), [({}, "4.000"), ({"keep_best": "step 1"}, "2.500")])
def test_the_loss_is_that_of_the_returned_model(
    tmp_path: Path, choices: dict[str, str], loss: str
) -> None:
    (tmp_path / "out").mkdir()
    origin = {"checkpoint": "ab" * 32, "exported": "the trained model (train_sft)"}
    (tmp_path / "out" / "origin.json").write_text(json.dumps(origin))
    folder = tmp_path / "sft"
    folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl")
    for step, value in ((1, 2.5), (2, 4.0)):
        metrics = {"global_step": float(step), "validation_loss": value}
        file.append(StepReport("train_sft", step, 2, metrics))
    (folder / "best.json").write_text(json.dumps({"step": 1}))
    shared = {"kind": "checkpoint", "format": "hf", "stage": "train_sft"}
    Manifest(**shared, content_hash="ab" * 32, choices=choices).write(folder)
    trained = make(CheckpointArtifact, folder, "train_sft")
    lines = closing_lines([trained, make(CheckpointArtifact, tmp_path / "out", "export")])
    assert lines[0] == f"validation loss of train_sft: {loss}"


def test_a_run_without_artifacts_prints_nothing() -> None:
    assert closing_lines([]) == []


def test_the_commands_that_it_names_exist() -> None:
    assert PROGRAM.is_file()
    assert {"chat", "eval"} <= COMMANDS.keys()


def test_a_sweep_ends_with_its_summary(tmp_path: Path) -> None:
    points = [
        ({"seed": seed, "grpo.learning_rate": rate}, None if seed and rate > 1e-4 else 0.25)
        for seed in (0, 1)
        for rate in (1e-4, 2e-4)
    ]
    sweep = summarize(points, apart="seed", confidence=0.95)
    (tmp_path / "sweep.json").write_text(json.dumps(asdict(sweep)))
    lines = closing_lines([make(SweepReport, tmp_path, "summarize_sweep", summary="3 of 4 points")])
    assert lines == [
        "point seed 0, learning_rate 0.0001: 0.250",
        "point seed 0, learning_rate 0.0002: 0.250",
        "point seed 1, learning_rate 0.0001: 0.250",
        "point seed 1, learning_rate 0.0002: failed",
        "mean of learning_rate 0.0001: 0.250 [0.250, 0.250] (2 points)",
        "mean of learning_rate 0.0002: 0.250 (1 point, 1 failed)",
        "3 of 4 points",
        f"summary: {tmp_path / 'deck.html'}",
    ]
