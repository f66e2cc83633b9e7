"""How a checkpoint is measured, and what it takes to be promoted."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig, with_rows_to_train_on
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.patterns import ALIAS_NAME


class EvaluationConfig(FrozenConfig):
    """Greedy accuracy on every validation prompt; pass@k and cons@k from sampled completions.

    `data` is where the prompts come from (its validation rows; it needs no rows to train on),
    `environment` says what is right (a reward of 1 or more), and `generation` how completions are
    sampled; left out, they are those of training. Each replaces the complete section, so that what
    it leaves out has the default and not the value of training.

    Attributes:
        num_samples_per_prompt: Completions to sample of each prompt, besides the greedy one; 0
            measures greedy accuracy alone.
        ks: For which k to measure pass@k and cons@k; none named: 1 and all samples.
        category: What figures are also given apart for: `task`, or a key of the rows' metadata.
        confidence: Of every interval.
        data: Where the prompts come from.
        environment: What says whether a completion is right.
        generation: How completions are sampled.
    """

    num_samples_per_prompt: NonNegativeInt = 4
    ks: list[PositiveInt] = Field(default_factory=list)
    category: str = Field(default="task", min_length=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    data: DataConfig | None = None
    environment: EnvironmentConfig | None = None
    generation: GenerationConfig | None = None

    @field_validator("data", mode="before")
    @classmethod
    def _trains_on_no_rows(cls, data: Any) -> Any:
        return with_rows_to_train_on(data)

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationConfig":
        if max(self.ks, default=0) > self.num_samples_per_prompt:
            raise ValueError(
                f"ks asks for {max(self.ks)} samples, but num_samples_per_prompt is "
                f"{self.num_samples_per_prompt}"
            )
        return self

    @property
    def all_ks(self) -> list[int]:
        """Every k to measure, in order."""
        if not self.num_samples_per_prompt:
            return []
        return sorted(set(self.ks) or {1, self.num_samples_per_prompt})


class PromotionConfig(FrozenConfig):
    """The paired improvement whose lower confidence bound must exceed `min_improvement`.

    Attributes:
        min_improvement: The difference of accuracies that the lower confidence bound must exceed;
            0.01 is one point.
        name: Alias that means the trained model once it is promoted, such as `production`. A
            verdict from the cache moves no alias.
    """

    min_improvement: float = Field(default=0.0, ge=-1, le=1)
    name: str | None = Field(default=None, pattern=ALIAS_NAME)
