"""The closing lines of a run: the model's accuracy, its folder, and commands to use it."""

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.evals.sweep import SweptSetting
from nemo_rl_core.history.records import point_label
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import program, short_path
from nemo_rl_core.telemetry.decks import sampled_figures, with_interval
from nemo_rl_core.telemetry.metrics import MetricsFile
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
    """Returns the closing lines of a run that made or found these artifacts, in their order."""
    lines: list[str] = []
    trained = None
    is_evaluated = any(isinstance(each, EvalReport) for each in artifacts)
    for artifact in artifacts:
        if isinstance(artifact, EvalReport):
            lines += _evaluation(artifact)
        elif artifact.stage == "train_reward_model" and isinstance(artifact, CheckpointArtifact):
            lines.append(f"reward model: {short_path(artifact.model_folder)}")
        elif isinstance(artifact, PromotionDecision | CompareReport):
            lines.append(artifact.summary)
        elif artifact.stage == "export" and isinstance(artifact, CheckpointArtifact):
            if trained is not None and not is_evaluated:
                lines += _validation_loss(trained)
            lines += _export(artifact, trained)
        elif isinstance(artifact, CheckpointArtifact):
            trained = artifact
        elif isinstance(artifact, SweepReport):
            lines += _sweep_lines(artifact.folder)
            lines += [artifact.summary, f"summary: {short_path(artifact.folder / 'deck.html')}"]
        elif isinstance(artifact, LineageReport):
            lines.append(f"lineage: {short_path(artifact.folder / 'deck.html')}")
    return lines


def _evaluation(report: EvalReport) -> list[str]:
    if report.stage == "evaluate_reward_model":
        return [f"reward model's accuracy: {_pair_accuracy(report)}"]
    if report.stage == "evaluate_pairs":
        margin = f"mean margin {report.metrics['margin']:+.3f} nats"
        return [f"pair accuracy of {report.measured}: {_pair_accuracy(report)}, {margin}"]
    lines = [
        f"accuracy of {report.measured}: {with_interval(report.metrics, 'greedy_accuracy')} "
        f"on {report.metrics['num_prompts']:.0f} held-out prompts, greedy"
    ]
    if sampled := sampled_figures(report.metrics):
        figures = ", ".join(f"{name} {figure}" for name, figure in sampled.items())
        lines.append(f"sampled: {figures}")
    return [*lines, f"completions: {program()} eval {_name(report)}"]


def _export(export: CheckpointArtifact, trained: CheckpointArtifact | None) -> list[str]:
    """Returns lines on the exported model, and on the trained one if its content differs."""
    origin = json.loads((export.records / "origin.json").read_text())
    model = short_path(export.model_folder)
    lines = [f"model: {model}", f"exported: {origin['exported']}"]
    if trained is not None and trained.content_hash != origin["checkpoint"]:
        lines.append(f"trained: {short_path(trained.model_folder)}")
    return [*lines, f"chat: {program()} chat {_name(export)}"]


def _name(artifact: Artifact) -> str:
    """Returns the id of an artifact of the store, which commands accept; else its folder."""
    is_in_store = artifact.folder.parent == Store.default().artifacts
    return artifact.folder.name if is_in_store else short_path(artifact.folder)


def _validation_loss(trained: CheckpointArtifact) -> list[str]:
    """Returns the held-out loss after the step of the model, if the run has validated it."""
    lines = MetricsFile(trained.records / "metrics.jsonl").read()
    best = trained.records / "best.json"
    if best.exists() and "keep_best" in trained.manifest.choices:  # not the last step's model
        step = json.loads(best.read_text())["step"]
        lines = [line for line in lines if line.metrics.get("global_step") == step]
    loss = lines[-1].metrics.get("validation_loss") if lines else None
    return [] if loss is None else [f"validation loss of {trained.stage}: {loss:.3f}"]


def _sweep_lines(folder: Path) -> list[str]:
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


def _pair_accuracy(report: EvalReport) -> str:
    metrics = report.metrics
    return f"{with_interval(metrics, 'accuracy')} on {metrics['num_pairs']:.0f} held-out pairs"
