"""Settings of evaluation and promotion."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig, with_rows_to_train_on
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.patterns import ALIAS_NAME


class EvaluationConfig(FrozenConfig):
    """Greedy accuracy on every validation prompt; pass@k and cons@k from sampled completions.

    `data` provides the prompts (its validation rows; it needs no training rows), `environment`
    decides whether a completion is correct (a reward of 1 or more), and `generation` has the
    sampling settings. By default they are those of training. Each replaces the complete section:
    a missing key has its default, not the value of training.

    Attributes:
        num_samples_per_prompt: Number of completions to sample per prompt in addition to the greedy
            one; 0 measures only greedy accuracy.
        ks: Values of k for pass@k and cons@k; by default 1 and the number of samples.
        category: Key by which figures are also reported separately: `task`, or a key of the rows'
            metadata.
        confidence: Confidence level of every interval.
        data: Source of the prompts.
        environment: Environment that decides whether a completion is correct.
        generation: Sampling settings.
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
    def _default_train(cls, data: Any) -> Any:
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
        """All values of k to measure, in ascending order."""
        if not self.num_samples_per_prompt:
            return []
        return sorted(set(self.ks) or {1, self.num_samples_per_prompt})


class PromotionConfig(FrozenConfig):
    """Promotes if the lower confidence bound of the paired improvement is large enough.

    Attributes:
        min_improvement: Difference of accuracies that the lower confidence bound must exceed; 0.01
            is one point.
        name: Alias for the trained model once it is promoted, such as `production`. A verdict from
            the cache does not move the alias.
    """

    min_improvement: float = Field(default=0.0, ge=-1, le=1)
    name: str | None = Field(default=None, pattern=ALIAS_NAME)
