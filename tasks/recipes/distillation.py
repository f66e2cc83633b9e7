"""The recipe of a distillation."""

from typing import Any, NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.distillation.config import DistillationConfig, DistillationSettings
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
    SFTTaskConfig,
    rollout_fields,
)
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig


class Teacher(FrozenConfig):
    """The model that is learnt from, and how it is trained first, if it has to be.

    Attributes:
        model: The teacher's model.
        sft: The teacher's own supervised training; None leaves it out.
    """

    model: ModelConfig = ModelFromConfig()
    sft: SFTConfig | None = None


class DistillationRecipe(PipelineRecipe):
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

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """The student; the teacher only scores."""
        return [self.model]

    def refuse_contradictions(self) -> None:
        """Rollouts are drawn."""
        refuse_for_training(self.generation)


class DistillationTaskConfig(DistillationSettings):
    """What `train_student` reads."""

    reward_content: str


class DistillationPlan(NamedTuple):
    """The settings of each stage."""

    teacher: ModelTaskConfig
    teacher_sft: SFTTaskConfig
    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    distillation: DistillationTaskConfig
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_distillation(config: DistillationRecipe) -> DistillationPlan:
    """Deals the recipe out to the stages."""
    fields: dict[str, Any] = rollout_fields(config)
    of_teacher = config.replace(model=config.teacher.model, sft=config.teacher.sft)
    return DistillationPlan(
        teacher=ModelTaskConfig.of(of_teacher),
        teacher_sft=SFTTaskConfig.of(of_teacher),
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        distillation=DistillationTaskConfig(distillation=config.distillation, **fields),
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: DistillationRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/distill.py`."""
    leave_record("distill", "distill", config, err)
