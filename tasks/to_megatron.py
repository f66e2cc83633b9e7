"""Stage: a transformers model as a Megatron checkpoint."""

import shutil
from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.waiting import waiting_for_files
from tasks.artifacts import Checkpoint, CheckpointArtifact
from tasks.pods.resources import WEIGHTS
from tasks.recipes.convert import MegatronTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(WEIGHTS)
def to_megatron(config: MegatronTaskConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Writes the weights in Megatron's sharded format, from which any layout can be trained."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.converters.megatron import hf_to_megatron

        # Written to a separate folder: the converter creates its own, and the work folder exists.
        aside = folder / "megatron"
        shutil.rmtree(aside, ignore_errors=True)
        with waiting_for_files("converting the model to Megatron", aside):
            hf_to_megatron(
                checkpoint.model_folder, aside, training=config.training, dtype=config.dtype
            )
        for part in list(aside.iterdir()):
            shutil.rmtree(folder / part.name, ignore_errors=True)
            part.rename(folder / part.name)
        aside.rmdir()
        layout = config.training
        summary = f"TP {layout.tensor_parallel_size}, PP {layout.pipeline_parallel_size}"
        return StageResult("checkpoint", "megatron", summary, step=checkpoint.step)

    parents = {"checkpoint": checkpoint}
    return CheckpointArtifact(
        **make(__name__, "to_megatron", config=config, parents=parents, work=work)
    )
