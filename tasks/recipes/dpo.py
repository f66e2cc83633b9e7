"""The recipe of a DPO run."""

from nemo_rl_core.algorithms.dpo.config import DPOSchedule, DPOSettings
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.model import ModelConfig
from tasks.recipes.common import trainer_fields
from tasks.recipes.pairs import PairPlan, PairRecipe, ReferenceTaskConfig


class DPORecipe(PairRecipe):
    """Recipe of a DPO run.

    Attributes:
        dpo: Direct preference optimization.
    """

    dpo: DPOSchedule = DPOSchedule()

    @property
    def compares_pairs(self) -> bool:
        """Whether held-out pairs of the data give the verdict: if no questions are named."""
        is_asked = self.evaluation_data is not None
        return self.evaluation is not None and not self.samples_rows and not is_asked

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """The model, if it samples pairs or answers."""
        return self.models if self.samplings else []

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """Empty if all rows are pairs; a separate validation set may hold questions."""
        validation = getattr(self.data, "validation", None)
        return [] if self.compares_pairs and validation is None else super().samplings


class DPOTaskConfig(DPOSettings):
    """Config of `dpo_iteration`."""


class DPOIterations(FrozenConfig):
    """Config of the loop over iterations, which passes it to its stages."""

    pairs: PairPlan
    reference: ReferenceTaskConfig
    dpo: DPOTaskConfig
    num_iterations: int

    @classmethod
    def of(cls, config: PairRecipe, dpo: DPOSchedule) -> "DPOIterations":
        """Extracts the config from a recipe."""
        return cls(
            pairs=PairPlan.of(config),
            reference=ReferenceTaskConfig.of(config),
            dpo=DPOTaskConfig(**trainer_fields(config, dpo=dpo.iteration)),
            num_iterations=dpo.num_iterations,
        )
