"""Source of preference pairs, and configs of the stages that make and measure them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import PipelineRecipe, rollout_fields, trainer_fields


class PairsFromRollouts(FrozenConfig):
    """The best and the worst of several completions that the policy itself samples.

    Attributes:
        num_generations_per_prompt: Completions to choose from, scored by the environment.
        margin: Difference of the rewards that a pair must exceed.
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

    @model_validator(mode="after")
    def _pairs_of_the_data_train_nothing_else(self) -> Self:
        others = [name for name in ("sft", "grpo") if getattr(self, name, None) is not None]
        if others and not self.samples_rows:
            raise ConfigError(
                f"{' and '.join(others)} cannot train on rows that are preference pairs",
                expected="pairs: {kind: rollouts}, or no stage that reads the rows otherwise",
                got=f"pairs: {{kind: data}} with {' and '.join(others)}",
                fix="set sft: null" if others == ["sft"] else "leave pairs out, or use dpo",
            )
        return self

    @property
    def trains_on(self) -> tuple[str, ...]:
        """Preference pairs if they come from the data, otherwise prompts to sample them from."""
        return super().trains_on if self.samples_rows else ("preferences",)

    @property
    def samples_rows(self) -> bool:
        """Whether pairs are sampled."""
        return not isinstance(self.pairs, PairsFromData)


class PairTaskConfig(RolloutSettings):
    """Config of `sample_pairs`."""

    pairs: PairsFromRollouts
    reward_content: str


class PairPlan(FrozenConfig):
    """How a workflow gets its pairs; `rollouts` is None if they come from the data."""

    rollouts: PairTaskConfig | None

    @classmethod
    def of(cls, config: PairRecipe) -> "PairPlan":
        """Extracts the config from a recipe."""
        if isinstance(config.pairs, PairsFromData):
            return cls(rollouts=None)
        fields: dict[str, Any] = rollout_fields(config)
        del fields["training"]  # sampling trains nothing, whatever the backend
        fields["isolation"] = fields["isolation"].only("environment", "generation")
        return cls(rollouts=PairTaskConfig(pairs=config.pairs, **fields))


class ReferenceTaskConfig(TrainerSettings):
    """Config of `cache_reference_logprobs`: no learning rate, no beta, no batch size."""

    @classmethod
    def of(cls, config: PipelineRecipe) -> "ReferenceTaskConfig":
        """Extracts the config from a recipe."""
        fields = trainer_fields(config)
        del fields["seed"]  # the stage draws no random numbers
        return cls(**fields)
