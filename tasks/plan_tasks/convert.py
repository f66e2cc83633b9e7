"""Splits the recipe of a conversion into configs of stages, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import DataTaskConfig, ModelTaskConfig
from tasks.recipes.convert import ConvertRecipe, MegatronTaskConfig, ProofTaskConfig
from tasks.stage.stage import plan_task


class ConvertPlan(NamedTuple):
    """The config of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    megatron: MegatronTaskConfig
    proof: ProofTaskConfig


@plan_task
def plan_convert(config: ConvertRecipe) -> ConvertPlan:
    """Splits the recipe into the configs of its stages."""
    return ConvertPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        megatron=MegatronTaskConfig(training=config.training, dtype=config.model.dtype),
        proof=config.proof,
    )


@failure_handler
def record_failure(config: ConvertRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/convert.py`."""
    leave_record("convert", "convert_model", config, err)
