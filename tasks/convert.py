"""Stage: converts a Megatron checkpoint to the transformers layout, with proof of equality."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import WEIGHTS
from tasks.recipes.convert import ProofTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(WEIGHTS)
def convert(config: ProofTaskConfig, checkpoint: Checkpoint, rows: Dataset) -> Checkpoint:
    """Writes Megatron's weights under their transformers names, and fails unless both models agree.

    Every tensor is bitwise identical after conversion to Megatron and back, and both models have
    the same logprobs for the rows. The original checkpoint is never changed.
    """

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.converters.megatron import megatron_to_hf
        from nemo_rl_core.converters.proof import prove
        from nemo_rl_core.data.loader import token_sequences

        target = folder / "model"
        shutil.rmtree(target, ignore_errors=True)
        with waiting_for_files("converting the model to transformers", target):
            megatron_to_hf(checkpoint.folder, target)
        sequences = token_sequences(rows.folder, target, limit=config.num_rows)
        with waiting("comparing the two models"):
            proof = prove(checkpoint.folder, target, sequences, tolerance=config.tolerance)
        write_atomic(folder / "proof.json", json.dumps(asdict(proof), indent=1))
        summary = (
            f"{proof.num_equal} of {proof.num_tensors} tensors equal, logprobs within "
            f"{proof.max_absolute_difference:.1g}"
        )
        return StageResult("checkpoint", "hf", summary, step=checkpoint.step)

    parents = {"checkpoint": checkpoint, "rows": rows}
    return CheckpointArtifact(
        **make(__name__, "convert", config=config, parents=parents, work=work)
    )
