"""Stage: a Megatron checkpoint in the transformers layout, proven to be the same model."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.platform.resources import WEIGHTS
from tasks.platform.stage import cached_task, make
from tasks.recipes.convert import ProofTaskConfig

NUMERICS_VERSION = 1


@cached_task(WEIGHTS)
def convert(config: ProofTaskConfig, checkpoint: Checkpoint, rows: Dataset) -> Checkpoint:
    """Writes what Megatron holds as transformers names it, and fails unless the two agree.

    Every tensor goes to Megatron and back to the same bits, and both models give the rows the same
    logprobs. The checkpoint stays as it was, whatever happens here.
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
