"""The recipe of a conversion: transformers to Megatron and back, proven on rows."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError
from pydantic import PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining
from tasks.experiments.common import DataStage, Experiment, ModelStage
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class ProofStage(FrozenConfig):
    """What `convert` reads.

    Attributes:
        num_rows: How many rows both models are compared on.
        tolerance: The largest difference of a token's logprob, in nats.
    """

    num_rows: PositiveInt = 16
    tolerance: PositiveFloat = 1e-4


class MegatronStage(FrozenConfig):
    """What `to_megatron` reads."""

    training: MegatronTraining
    dtype: DType


class ConvertExperiment(Experiment):
    """All of a conversion: `model` in the layout of `training`, compared on rows of `data`.

    Attributes:
        proof: How the conversion is proven.
    """

    training: MegatronTraining = MegatronTraining()
    proof: ProofStage = ProofStage()


class ConvertPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    megatron: MegatronStage
    proof: ProofStage


@plan_task
def plan_convert(config: ConvertExperiment) -> ConvertPlan:
    """Deals the recipe out to the stages."""
    return ConvertPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        megatron=MegatronStage(training=config.training, dtype=config.model.dtype),
        proof=config.proof,
    )


@failure_handler
def record_failure(config: ConvertExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/convert.py`."""
    leave_record("convert", "convert_model", config, err)
