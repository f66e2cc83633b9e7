"""The closing lines of a run: the model's accuracy, its folder, and commands to use it."""

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.evals.sweep import SweptSetting
from nemo_rl_core.history.records import point_label
from nemo_rl_core.telemetry.intervals import sampled_figures, with_interval
from nemo_rl_core.telemetry.program import program
from tasks.artifacts import (
    Artifact,
    CheckpointArtifact,
    CompareReport,
    EvalReport,
    LineageReport,
    PromotionDecision,
    SweepReport,
)


def closing_lines(artifacts: Sequence[Artifact]) -> list[str]:
    """Lines for the terminal.

    Args:
        artifacts: Artifacts of the run's stages, new or cached, in order.
    """
    lines = []
    for artifact in artifacts:
        if isinstance(artifact, EvalReport) and artifact.stage == "evaluate_reward_model":
            lines.append(f"reward model's accuracy: {_pair_accuracy(artifact)}")
        elif isinstance(artifact, EvalReport):
            lines.append(f"accuracy of {artifact.measured}: {_accuracy(artifact)}")
            if sampled := sampled_figures(artifact.metrics):
                said = ", ".join(f"{name} {figure}" for name, figure in sampled.items())
                lines.append(f"sampled: {said}")
            lines.append(f"completions: {program()} eval {artifact.folder}")
        elif artifact.stage == "train_reward_model" and isinstance(artifact, CheckpointArtifact):
            lines.append(f"reward model: {artifact.model_folder}")
        elif isinstance(artifact, PromotionDecision | CompareReport):
            lines.append(artifact.summary)
        elif artifact.stage == "export" and isinstance(artifact, CheckpointArtifact):
            lines.append(f"model: {artifact.model_folder}")
            lines.append(f"chat:  {program()} chat {artifact.model_folder}")
        elif isinstance(artifact, SweepReport):
            lines += _sweep_lines(artifact.folder)
            lines += [artifact.summary, f"summary: {artifact.folder / 'deck.html'}"]
        elif isinstance(artifact, LineageReport):
            lines.append(f"lineage: {artifact.folder / 'deck.html'}")
    return lines


def _sweep_lines(folder: Path) -> list[str]:
    """The accuracy of each point, and the mean of each setting."""
    sweep = json.loads((folder / "sweep.json").read_text())
    figures = [
        "failed" if each["accuracy"] is None else f"{each['accuracy']:.3f}"
        for each in sweep["points"]
    ]
    points = [
        f"point {point_label(each['point'])}: {figure}"
        for each, figure in zip(sweep["points"], figures, strict=True)
    ]
    return [*points, *(f"mean of {SweptSetting(**each).described}" for each in sweep["settings"])]


def _accuracy(report: EvalReport) -> str:
    metrics = report.metrics
    return (
        f"{with_interval(metrics, 'greedy_accuracy')} "
        f"on {metrics['num_prompts']:.0f} held-out prompts, greedy"
    )


def _pair_accuracy(report: EvalReport) -> str:
    metrics = report.metrics
    return f"{with_interval(metrics, 'accuracy')} on {metrics['num_pairs']:.0f} held-out pairs"
