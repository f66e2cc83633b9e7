"""Stage: a student learns from a teacher, on the student's own completions."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.decks import curves, last_rollouts
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset
from tasks.pods.resources import TRAIN
from tasks.recipes.distillation import DistillationTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_CURVES = ("loss", "forward_kl", "reverse_kl", "student_topk_mass", "reward", "grad_norm")


@cached_task(TRAIN)
def train_student(
    config: DistillationTaskConfig,
    student: Checkpoint,
    teacher: Checkpoint,
    train: Dataset,
    validation: Dataset | None = None,
) -> Checkpoint:
    """Samples from the student, and trains it towards the teacher's distribution."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.distillation.trainer import DistillationTrainer
        from nemo_rl_core.trainers.loop import RunSpec

        spec = RunSpec(
            train=train.folder,
            start=student.model_folder,
            work=folder,
            validation=validation.folder if validation else None,
            reference=teacher.model_folder,
        )
        result = DistillationTrainer(config).run(spec)
        summary, deck = curves(folder, _CURVES)
        deck += last_rollouts(folder)
        return result.made(summary=summary, deck=deck)

    parents = {"student": student, "teacher": teacher, "train": train}
    parents |= {"validation": validation} if validation else {}
    fields = make(__name__, "train_student", config=config, parents=parents, work=work)
    return CheckpointArtifact(**fields)
