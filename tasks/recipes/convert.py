"""The recipe of a conversion: transformers to Megatron and back, proven on rows."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError
from pydantic import PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.model import DType, ModelConfig
from nemo_rl_core.config.training import MegatronTraining
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import DataTaskConfig, ModelTaskConfig, PipelineRecipe


class ProofTaskConfig(FrozenConfig):
    """What `convert` reads.

    Attributes:
        num_rows: How many rows both models are compared on.
        tolerance: The largest difference of a token's logprob, in nats.
    """

    num_rows: PositiveInt = 16
    tolerance: PositiveFloat = 1e-4


class MegatronTaskConfig(FrozenConfig):
    """What `to_megatron` reads."""

    training: MegatronTraining
    dtype: DType


class ConvertRecipe(PipelineRecipe):
    """All of a conversion: `model` in the layout of `training`, compared on rows of `data`.

    Attributes:
        proof: How the conversion is proven.
    """

    training: MegatronTraining = MegatronTraining()
    proof: ProofTaskConfig = ProofTaskConfig()

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """None: a conversion is proven by logprobs."""
        return []


class ConvertPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    megatron: MegatronTaskConfig
    proof: ProofTaskConfig


@plan_task
def plan_convert(config: ConvertRecipe) -> ConvertPlan:
    """Deals the recipe out to the stages."""
    return ConvertPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        megatron=MegatronTaskConfig(training=config.training, dtype=config.model.dtype),
        proof=config.proof,
    )


@failure_handler
def record_failure(config: ConvertRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/convert.py`."""
    leave_record("convert", "convert_model", config, err)
