"""Evaluations for a model card, read from manifests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.store.ancestry import ancestry, ancestry_of, recorded_ancestors
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry.decks import sampled_figures


@dataclass(frozen=True)
class CardEvaluation:
    """The manifests of an evaluation and of the checkpoint that it evaluated."""

    manifest: Manifest
    checkpoint: Manifest

    @property
    def accuracy(self) -> tuple[float, float, float] | None:
        """Fraction of correct answers or correctly ranked pairs, with its interval's bounds."""
        figures = self.manifest.figures
        name = "greedy_accuracy" if "greedy_accuracy" in figures else "accuracy"
        if name not in figures:
            return None
        return figures[name], figures[f"{name}_low"], figures[f"{name}_high"]

    @property
    def sampled(self) -> dict[str, str]:
        """pass@k and cons@k with their intervals, as text."""
        return sampled_figures(self.manifest.figures)

    @property
    def num_rows(self) -> int:
        """Number of prompts or pairs of the evaluation."""
        figures = self.manifest.figures
        return int(figures.get("num_prompts", figures.get("num_pairs", 0)))

    @property
    def confidence(self) -> float | None:
        """Confidence level of the interval, from the recipe."""
        config = self.manifest.config
        level = config.get("evaluation", config).get("confidence")
        return None if level is None else float(level)


def recorded_evaluations(folder: Path) -> list[CardEvaluation]:
    """Returns the evaluations among an artifact and its ancestors, oldest first."""
    manifests = [Manifest.read(folder)]
    manifests += [each.manifest for each in ancestry_of(folder) if each.manifest]
    recorded = recorded_ancestors(folder)
    evaluations = [_evaluated(each, recorded) for each in manifests if each.figures]
    return sorted(filter(None, evaluations), key=lambda each: each.manifest.created_at)


def _evaluated(manifest: Manifest, recorded: Mapping[str, Manifest]) -> CardEvaluation | None:
    for each in ancestry(manifest, recorded):
        if each.depth == 1 and each.manifest and each.ref.kind in ("checkpoint", "model"):
            return CardEvaluation(manifest, each.manifest)
    return None
