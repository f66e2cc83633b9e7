"""Stage: the model of a finished run, as a folder for transformers and vLLM."""

import json
import shutil
from pathlib import Path

from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.store import CARD
from nemo_rl_core.telemetry.waiting import waiting_for_files
from tasks.artifacts import (
    Artifact,
    Checkpoint,
    CheckpointArtifact,
    Promotion,
    PromotionDecision,
)
from tasks.pods.resources import WEIGHTS
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(WEIGHTS)
def export(
    config: ExportConfig,
    start: Checkpoint,
    trained: Checkpoint,
    decision: Promotion | None = None,
) -> Checkpoint:
    """Writes the model without its training state, and checks that it loads to the same weights."""
    exports_start = _exports_start(config, decision)
    checkpoint = start if exports_start else trained
    which = "the model that training started from" if exports_start else "the trained model"
    exported = f"{which} ({checkpoint.stage})"
    verdict = decision.summary if decision else "not compared with the model it started from"

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.converters.export import export_model
        from nemo_rl_core.history.card import model_card
        from nemo_rl_core.history.card_evaluations import recorded_evaluations

        shutil.rmtree(folder / "model", ignore_errors=True)
        with waiting_for_files("writing the model", folder / "model"):
            count = export_model(checkpoint.model_folder, folder / "model")
        card = model_card(
            checkpoint.model_folder.parent,
            evaluations=recorded_evaluations(decision.folder) if decision else [],
            exported=f"{exported}; {verdict}",
        )
        write_atomic(folder / "model" / CARD, card)
        # Equal weights may come from different decisions; the content then contains the decision.
        origin = {
            "checkpoint": checkpoint.content_hash,
            "decision": decision.content_hash if decision else None,
            "exported": exported,
            "verdict": verdict,
        }
        write_atomic(folder / "origin.json", json.dumps(origin, indent=1))
        # Steps are counted from the end of the supervised start, so step 0 is not named.
        step = checkpoint.step
        step_text = f" of step {step}" if step else ""
        summary = f"{exported}: {count / 1e6:.2f} M parameters{step_text}"
        return StageResult("model", "hf", summary, step=step)

    parents: dict[str, Artifact] = {"start": start, "trained": trained}
    parents |= {"decision": decision} if decision else {}
    return CheckpointArtifact(**make(__name__, "export", config=config, parents=parents, work=work))


def _exports_start(config: ExportConfig, decision: PromotionDecision | None) -> bool:
    if config.model == "trained":
        return False
    assert decision is not None, "the recipe refuses export.model: promoted without a verdict"
    return not decision.promoted
