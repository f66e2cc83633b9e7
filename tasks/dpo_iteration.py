"""Stage: some steps of DPO on pairs, from one checkpoint to the next."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, Logprobs
from tasks.pods.resources import TRAIN
from tasks.recipes.dpo import DPOTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(TRAIN)
def dpo_iteration(
    config: DPOTaskConfig,
    start: Checkpoint,
    reference: Checkpoint,
    pairs: Dataset,
    iteration: int,
    logprobs: Logprobs | None = None,
    validation: Dataset | None = None,
) -> Checkpoint:
    """Trains on the pairs of one iteration, 1-based."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.dpo.trainer import DPOTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=pairs.folder,
            start=start.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
            reference=reference.model_folder,
            reference_logprobs=logprobs.folder if logprobs else None,
            resume=start.folder if iteration > 1 else None,
            iteration=iteration,
        )
        result = DPOTrainer(config).run(spec)
        summary, deck = curves(folder, ("accuracy", "loss", "margin", "grad_norm"))
        return result.made(summary=summary, deck=deck)

    parents = {"start": start, "reference": reference, "pairs": pairs}
    parents |= {"logprobs": logprobs} if logprobs else {}
    parents |= {"validation": validation} if validation else {}
    fields = make(
        __name__, "dpo_iteration", config=config, parents=parents, work=work, part=str(iteration)
    )
    return CheckpointArtifact(**fields)
