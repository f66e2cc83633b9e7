"""The recipe of a DPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.dpo.config import DPOSchedule, DPOSettings
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.model import ModelConfig
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    trainer_fields,
)
from tasks.recipes.pairs import PairPlan, PairRecipe, ReferenceTaskConfig
from tasks.recipes.verdict import (
    ChooseQuestionsTaskConfig,
    PairEvaluationTaskConfig,
    PairVerdictConfig,
    VerdictConfig,
)


class DPORecipe(PairRecipe):
    """All of a DPO run.

    Attributes:
        dpo: Direct preference optimization.
    """

    dpo: DPOSchedule = DPOSchedule()

    @property
    def compares_pairs(self) -> bool:
        """Whether held-out pairs of the data give the verdict: where no questions are named."""
        is_asked = self.evaluation_data is not None
        return self.evaluation is not None and not self.samples_rows and not is_asked

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """The model, where it samples pairs or answers."""
        return self.models if self.samplings else []

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """Empty if all rows are pairs; a separate validation set may hold questions."""
        named = getattr(self.data, "validation", None)
        return [] if self.compares_pairs and named is None else super().samplings


class DPOTaskConfig(DPOSettings):
    """What `dpo_iteration` reads."""


class DPOIterations(FrozenConfig):
    """What the loop over iterations deals on to its stages."""

    pairs: PairPlan
    reference: ReferenceTaskConfig
    dpo: DPOTaskConfig
    num_iterations: int

    @classmethod
    def of(cls, config: PairRecipe, dpo: DPOSchedule) -> "DPOIterations":
        """The recipe's share."""
        return cls(
            pairs=PairPlan.of(config),
            reference=ReferenceTaskConfig.of(config),
            dpo=DPOTaskConfig(dpo=dpo.iteration, **trainer_fields(config)),
            num_iterations=dpo.num_iterations,
        )


class DPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    iterations: DPOIterations
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_dpo(config: DPORecipe) -> DPOPlan:
    """Deals the recipe out to the stages."""
    return DPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        iterations=DPOIterations.of(config, config.dpo),
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config, pairs=_pair_verdict(config)),
        export=config.export,
    )


def _pair_verdict(config: DPORecipe) -> PairVerdictConfig | None:
    if config.evaluation is None or not config.compares_pairs:
        return None
    return PairVerdictConfig(
        logprobs=ReferenceTaskConfig.of(config),
        evaluation=PairEvaluationTaskConfig(
            per_token=config.dpo.is_per_token, confidence=config.evaluation.confidence
        ),
    )


@failure_handler
def record_failure(config: DPORecipe, err: FlyteError | None = None) -> None:
    """After `workflows/dpo.py`."""
    leave_record("dpo", "dpo", config, err)
