"""Stage: some steps of PPO, from one checkpoint of policy and critic to the next."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves, last_rollouts
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import TRAIN
from tasks.recipes.ppo import PPOTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_CURVES = (
    "reward",
    "loss",
    "value_loss",
    "explained_variance",
    "policy_kl",
    "token_mult_prob_error",
    "completion_length",
    "grad_norm",
)


@cached_task(TRAIN)
def ppo_iteration(
    config: PPOTaskConfig,
    start: Checkpoint,
    reference: Checkpoint,
    train: Dataset,
    iteration: int,
    validation: Dataset | None = None,
) -> Checkpoint:
    """Rolls out, scores, and trains policy and critic for the steps of one iteration, 1-based."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.ppo.trainer import PPOTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=train.folder,
            start=start.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
            reference=reference.model_folder,
            resume=start.folder if iteration > 1 else None,
            iteration=iteration,
        )
        result = PPOTrainer(config).run(spec)
        summary, deck = curves(folder, _CURVES)
        deck += last_rollouts(folder)
        return result.made(summary=summary, deck=deck)

    parents = {"start": start, "reference": reference, "train": train}
    parents |= {"validation": validation} if validation else {}
    fields = make(
        __name__, "ppo_iteration", config=config, parents=parents, work=work, part=str(iteration)
    )
    return CheckpointArtifact(**fields)
