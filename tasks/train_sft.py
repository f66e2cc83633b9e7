"""Stage: supervised fine-tuning before reinforcement learning."""

from dataclasses import replace
from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import TRAIN
from tasks.recipes.common import SFTTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(TRAIN)
def train_sft(
    config: SFTTaskConfig, base: Checkpoint, train: Dataset, validation: Dataset | None = None
) -> Checkpoint:
    """Trains on the completions of the training rows."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=train.folder,
            start=base.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
        )
        result = SFTTrainer(config.model_dump()).run(spec)
        summary, deck = curves(folder, ("loss", "grad_norm"))
        # Steps are counted from the end of the supervised start.
        return replace(result.made(summary=summary, deck=deck), step=0)

    parents = {"base": base, "train": train}
    parents |= {"validation": validation} if validation else {}
    return CheckpointArtifact(
        **make(__name__, "train_sft", config=config, parents=parents, work=work)
    )
