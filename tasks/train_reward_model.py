"""Stage: a reward model from preference pairs."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import TRAIN
from tasks.recipes.reward_model import RewardModelTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(TRAIN)
def train_reward_model(
    config: RewardModelTaskConfig,
    base: Checkpoint,
    pairs: Dataset,
    validation: Dataset | None = None,
) -> Checkpoint:
    """Trains a scalar head, and the model under it, on the pairs."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.reward_model.trainer import RewardModelTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=pairs.folder,
            start=base.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
        )
        result = RewardModelTrainer(config).run(spec)
        summary, deck = curves(folder, ("accuracy", "loss", "margin", "grad_norm"))
        return result.made(summary=summary, deck=deck)

    parents = {"base": base, "pairs": pairs}
    parents |= {"validation": validation} if validation else {}
    fields = make(__name__, "train_reward_model", config=config, parents=parents, work=work)
    return CheckpointArtifact(**fields)
