"""The recipe of a distillation."""

from nemo_rl_core.algorithms.distillation.config import DistillationConfig, DistillationSettings
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig
from tasks.recipes.common import PipelineRecipe


class Teacher(FrozenConfig):
    """The model to learn from, and its own training, if there is any.

    Attributes:
        model: The teacher's model.
        sft: The teacher's own supervised training; None leaves it out.
    """

    model: ModelConfig = ModelFromConfig()
    sft: SFTConfig | None = None


class DistillationRecipe(PipelineRecipe):
    """Recipe of a distillation; `model` and `sft` are the student's.

    Attributes:
        teacher: The model to learn from.
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
        """Refuses settings that are not valid for sampled rollouts."""
        refuse_for_training(self.generation)


class DistillationTaskConfig(DistillationSettings):
    """Config of `train_student`."""

    reward_content: str
