"""The last lines of a run: how good the model is, where it lies, and how to use it."""

from collections.abc import Mapping

from tasks.artifacts import Artifact, CheckpointArtifact, EvalReport, PromotionDecision


def closing_lines(artifacts: Mapping[str, Artifact]) -> list[str]:
    """Lines for the terminal.

    Args:
        artifacts: What the run's stages made or took from the cache, by stage.
    """
    decision = next((a for a in artifacts.values() if isinstance(a, PromotionDecision)), None)
    exported = artifacts.get("export")
    lines = []
    reports = [a for a in artifacts.values() if isinstance(a, EvalReport)]
    lines += [f"greedy accuracy {_when(report)}: {_accuracy(report)}" for report in reports]
    if decision is not None:
        lines.append(decision.summary)
    if isinstance(exported, CheckpointArtifact):
        lines.append(f"model: {exported.model_folder}")
        lines.append(f"chat:  .venv/bin/python -m nemo_rl_core.evals.chat {exported.model_folder}")
    return lines


def _when(report: EvalReport) -> str:
    return report.manifest.stage.removeprefix("evaluate").strip() or "held out"


def _accuracy(report: EvalReport) -> str:
    metrics = report.metrics
    return (
        f"{metrics['greedy_accuracy']:.3f} "
        f"[{metrics['greedy_accuracy_low']:.3f}, {metrics['greedy_accuracy_high']:.3f}] "
        f"on {metrics['num_prompts']:.0f} prompts"
    )
