"""Stage: a checkpoint measured on rows that were never trained on."""

import html
import json
from pathlib import Path
from typing import Any

from nemo_rl_core.distributed.session import connect
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.decks import figures_html, sampled_figures, with_interval
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, EvalReport, Evaluation
from tasks.pods.resources import GENERATE
from tasks.recipes.common import EvaluationTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_ROWS_SHOWN = 40
_COLUMNS_SHOWN = ("mode", "prompt", "completion", "answer", "reward", "truncated", "error")


@cached_task(GENERATE)
def evaluate(
    config: EvaluationTaskConfig, checkpoint: Checkpoint, validation: Dataset
) -> Evaluation:
    """Computes greedy accuracy with its interval, pass@k and cons@k, in total and per category."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.evals.evaluate import evaluate as evaluate_model
        from nemo_rl_core.evals.rows import save_eval_rows

        result = evaluate_model(
            checkpoint.model_folder,
            validation.folder,
            connect(config.cluster),
            config=config.evaluation,
            settings=config,
        )
        save_eval_rows(result.rows, folder / "rows.parquet")
        write_atomic(folder / "metrics.json", json.dumps(result.metrics, indent=1))
        write_atomic(folder / "categories.json", json.dumps(result.categories, indent=1))
        return StageResult(
            "evaluation",
            "parquet",
            f"{checkpoint_label(checkpoint)}: {_summary(result.metrics)}",
            num_tokens=result.num_tokens,
            peak_memory_gib=result.peak_memory_gib,
            step=checkpoint.step,
            deck=_deck(result.metrics, result.categories) + completions_html(_worst(result.rows)),
            figures=result.metrics,
        )

    parents = {"checkpoint": checkpoint, "validation": validation}
    fields = make(__name__, "evaluate", config=config, parents=parents, work=work)
    metrics = json.loads((Path(fields["directory"].path) / "metrics.json").read_text())
    return EvalReport(**fields, metrics=metrics, measured=checkpoint_label(checkpoint))


def checkpoint_label(checkpoint: CheckpointArtifact) -> str:
    """Returns a label: the stage that made the checkpoint, or the name of a model that was given.

    A folder has its own name; one with the name `model`, as in every artifact, has its parent's.
    """
    if checkpoint.stage != "prepare_model":
        return checkpoint.stage
    name = str(checkpoint.manifest.config["model"]["name"])
    folder = Path(name)
    if not folder.is_absolute():
        return name
    return folder.parent.name if folder.name == "model" else folder.name


def _summary(metrics: dict[str, float]) -> str:
    parts = [f"greedy accuracy {with_interval(metrics, 'greedy_accuracy')}"]
    parts += [f"{name} {figure}" for name, figure in sampled_figures(metrics).items()]
    if unscored := metrics["num_unscored"]:
        parts.append(f"{unscored:.0f} completions not scored")
    return ", ".join(parts)


def _deck(metrics: dict[str, float], categories: dict[str, dict[str, float]]) -> str:
    shown = categories if len(categories) > 1 else {}
    parts = [f"<h3>{html.escape(name)}</h3>{figures_html(each)}" for name, each in shown.items()]
    return figures_html(metrics) + "".join(parts)


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows for the deck, those without the right answer first."""
    shown = sorted(rows, key=lambda row: bool(row["correct"]))[:_ROWS_SHOWN]
    return [{name: row[name] for name in _COLUMNS_SHOWN} for row in shown]
