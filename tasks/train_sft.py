"""Stage: supervised fine-tuning before reinforcement learning."""

from pathlib import Path

from nemo_rl_core.distributed.session import connect
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.decks import curves
from tasks.experiment import SFTStage
from tasks.resources import ray_stage
from tasks.stage import Made, cached_task, make


@cached_task(task_config=ray_stage())
def train_sft(config: SFTStage, base: Checkpoint, train: Dataset) -> Checkpoint:
    """Trains on the completions of the training rows."""
    sft = config.sft
    assert sft is not None, "the workflow leaves this stage out where the recipe has no sft"

    def work(folder: Path) -> Made:
        from nemo_rl_core.algorithms.sft.trainer import SFTTrainer

        trainer = SFTTrainer(
            sft,
            connect(config.cluster),
            training=config.training,
            dtype=config.dtype,
            seed=config.seed,
        )
        result = trainer.fit(train.folder, start=base.model_folder, work=folder)
        summary, deck = curves(folder, ("loss", "grad_norm"))
        return Made(
            "checkpoint",
            "hf",
            summary,
            num_tokens=result.num_tokens,
            peak_memory_gib=result.peak_memory_gib,
            step=0,
            deck=deck,
        )

    parents = {"base": base, "train": train}
    return CheckpointArtifact(**make("train_sft", config=config, parents=parents, work=work))
