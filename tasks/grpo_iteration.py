"""Stage: some steps of GRPO, from one checkpoint to the next."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves, last_rollouts
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import TRAIN
from tasks.recipes.grpo import GRPOTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_CURVES = (
    "reward",
    "loss",
    "kl",
    "token_mult_prob_error",
    "handover_mult_prob_error",
    "completion_length",
    "zero_variance_fraction",
    "grad_norm",
)


@cached_task(TRAIN)
def grpo_iteration(
    config: GRPOTaskConfig,
    start: Checkpoint,
    reference: Checkpoint,
    train: Dataset,
    iteration: int,
    reward_model: Checkpoint | None = None,
    validation: Dataset | None = None,
) -> Checkpoint:
    """Samples, scores, trains and syncs for the steps of one iteration, 1-based.

    `reward_model` scores if the environment is a reward model without a name.
    """

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.grpo.asynchronous import AsyncGRPOTrainer
        from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=train.folder,
            start=start.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
            reference=reference.model_folder,
            resume=start.folder if iteration > 1 else None,
            iteration=iteration,
            reward_model=reward_model.model_folder if reward_model else None,
        )
        trainer = GRPOTrainer if config.grpo.asynchronous is None else AsyncGRPOTrainer
        result = trainer(config).run(spec)
        summary, deck = curves(folder, _CURVES)
        deck += last_rollouts(folder)
        return result.made(summary=summary, deck=deck)

    parents = {"start": start, "reference": reference, "train": train}
    parents |= {"reward_model": reward_model} if reward_model else {}
    parents |= {"validation": validation} if validation else {}
    fields = make(
        __name__, "grpo_iteration", config=config, parents=parents, work=work, part=str(iteration)
    )
    return CheckpointArtifact(**fields)
