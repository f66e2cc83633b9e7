"""The recipe of a distillation."""

from typing import Any, NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.distillation.config import DistillationConfig, DistillationSettings
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    Experiment,
    ModelStage,
    PromotionStage,
    QuestionStage,
    SFTStage,
    rollout_fields,
)
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class Teacher(FrozenConfig):
    """The model that is learnt from, and how it is trained first, if it has to be.

    Attributes:
        model: The teacher's model.
        sft: The teacher's own supervised training; None leaves it out.
    """

    model: ModelConfig = ModelFromConfig()
    sft: SFTConfig | None = None


class DistillationExperiment(Experiment):
    """All of a distillation; `model` and `sft` are the student's.

    Attributes:
        teacher: The model that is learnt from.
        distillation: On-policy distillation.
    """

    teacher: Teacher = Teacher()
    distillation: DistillationConfig = DistillationConfig()

    @property
    def models(self) -> list[ModelConfig]:
        """The student and the teacher."""
        return [self.model, self.teacher.model]

    def refuse_contradictions(self) -> None:
        """Rollouts are drawn."""
        refuse_for_training(self.generation)


class DistillationStage(DistillationSettings):
    """What `train_student` reads."""

    reward_content: str


class DistillationPlan(NamedTuple):
    """The settings of each stage."""

    teacher: ModelStage
    teacher_sft: SFTStage
    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    distillation: DistillationStage
    evaluation: EvaluationStage
    promotion: PromotionStage


@plan_task
def plan_distillation(config: DistillationExperiment) -> DistillationPlan:
    """Deals the recipe out to the stages."""
    fields: dict[str, Any] = rollout_fields(config)
    of_teacher = config.replace(model=config.teacher.model, sft=config.teacher.sft)
    return DistillationPlan(
        teacher=ModelStage.of(of_teacher),
        teacher_sft=SFTStage.of(of_teacher),
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        distillation=DistillationStage(distillation=config.distillation, **fields),
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )


@failure_handler
def record_failure(config: DistillationExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/distill.py`."""
    leave_record("distill", "distill", config, err)
