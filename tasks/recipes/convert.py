"""The recipe of a conversion: transformers to Megatron and back, proven on rows."""

from pydantic import PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.model import DType, ModelConfig
from nemo_rl_core.config.training import MegatronTraining
from tasks.recipes.common import PipelineRecipe


class ProofTaskConfig(FrozenConfig):
    """Config of `convert`.

    Attributes:
        num_rows: Number of rows on which the models are compared.
        tolerance: Maximum difference of a token's logprob, in nats.
    """

    num_rows: PositiveInt = 16
    tolerance: PositiveFloat = 1e-4


class MegatronTaskConfig(FrozenConfig):
    """Config of `to_megatron`."""

    training: MegatronTraining
    dtype: DType


class ConvertRecipe(PipelineRecipe):
    """Recipe of a conversion of `model` to the layout of `training`, compared on rows of `data`.

    Attributes:
        proof: How the conversion is proven.
    """

    training: MegatronTraining = MegatronTraining()
    proof: ProofTaskConfig = ProofTaskConfig()

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """Empty: a conversion is proven by logprobs."""
        return []
