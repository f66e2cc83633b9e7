"""Splits the recipe of a DPO run into configs of stages, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.config.export import ExportConfig
from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
)
from tasks.recipes.dpo import DPOIterations, DPORecipe
from tasks.recipes.pairs import ReferenceTaskConfig
from tasks.recipes.verdict import (
    ChooseQuestionsTaskConfig,
    PairEvaluationTaskConfig,
    PairVerdictConfig,
    VerdictConfig,
)
from tasks.stage.stage import plan_task


class DPOPlan(NamedTuple):
    """The config of each stage."""

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
    """Splits the recipe into the configs of its stages."""
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
    """Records a failure of `workflows/dpo.py`."""
    leave_record("dpo", "dpo", config, err)
