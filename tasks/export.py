"""Stage: the model that stands at the end, as a folder for transformers and vLLM."""

import json
import shutil
from pathlib import Path

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.store import CARD
from nemo_rl_core.telemetry.waiting import waiting_for_files
from tasks.artifacts import Checkpoint, CheckpointArtifact, Promotion
from tasks.platform.resources import WEIGHTS
from tasks.platform.stage import cached_task, make

NUMERICS_VERSION = 1


class ExportTaskConfig(FrozenConfig):
    """What `export` reads: nothing but its checkpoint."""


@cached_task(WEIGHTS)
def export(checkpoint: Checkpoint, decision: Promotion) -> Checkpoint:
    """Writes the model alone, and proves that it loads to the same weights."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.converters.export import export_model
        from nemo_rl_core.history.card import model_card
        from nemo_rl_core.history.card_evaluations import evaluations_behind

        shutil.rmtree(folder / "model", ignore_errors=True)
        with waiting_for_files("writing the model", folder / "model"):
            count = export_model(checkpoint.model_folder, folder / "model")
        evaluations = evaluations_behind(decision.folder)
        card = model_card(checkpoint.model_folder.parent, evaluations=evaluations)
        write_atomic(folder / "model" / CARD, card)
        # Equal weights may come from other decisions; the content then says which.
        origin = {"checkpoint": checkpoint.content_hash, "decision": decision.content_hash}
        write_atomic(folder / "origin.json", json.dumps(origin, indent=1))
        step = checkpoint.step
        return StageResult(
            "model", "hf", f"{count / 1e6:.2f} M parameters of step {step}", step=step
        )

    parents = {"checkpoint": checkpoint, "decision": decision}
    return CheckpointArtifact(
        **make(__name__, "export", config=ExportTaskConfig(), parents=parents, work=work)
    )
