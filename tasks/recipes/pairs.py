"""Where preference pairs come from, and what the stages read that make and measure them."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from tasks.recipes.common import PipelineRecipe, rollout_fields, trainer_fields


class PairsFromRollouts(FrozenConfig):
    """The best against the worst of several completions that the policy itself samples.

    Attributes:
        num_generations_per_prompt: Completions to choose from, scored by the environment.
        margin: By more than how much their rewards must differ.
    """

    kind: Literal["rollouts"] = "rollouts"
    num_generations_per_prompt: int = Field(default=8, ge=2)
    margin: NonNegativeFloat = 0.0


class PairsFromData(FrozenConfig):
    """The rows of the data set, which must be preferences."""

    kind: Literal["data"] = "data"


PairsConfig = Annotated[PairsFromRollouts | PairsFromData, Field(discriminator="kind")]


class PairRecipe(PipelineRecipe):
    """A recipe whose algorithm learns from preference pairs.

    Attributes:
        pairs: Where preference pairs come from.
    """

    pairs: PairsConfig = PairsFromRollouts()


class PairTaskConfig(RolloutSettings):
    """What `sample_pairs` reads."""

    pairs: PairsFromRollouts
    reward_content: str


class PairPlan(FrozenConfig):
    """How a workflow gets its pairs; `rollouts` is None where they come from the data."""

    rollouts: PairTaskConfig | None

    @classmethod
    def of(cls, config: PairRecipe) -> "PairPlan":
        """The recipe's share."""
        if isinstance(config.pairs, PairsFromData):
            return cls(rollouts=None)
        fields: dict[str, Any] = rollout_fields(config)
        del fields["training"]  # sampling trains nothing, whatever the backend
        return cls(rollouts=PairTaskConfig(pairs=config.pairs, **fields))


class ReferenceTaskConfig(TrainerSettings):
    """What `cache_reference_logprobs` reads: no learning rate, no beta, no batch size."""

    @classmethod
    def of(cls, config: PipelineRecipe) -> "ReferenceTaskConfig":
        """The recipe's share."""
        fields = trainer_fields(config)
        del fields["seed"]  # nothing is drawn
        return cls(**fields)
