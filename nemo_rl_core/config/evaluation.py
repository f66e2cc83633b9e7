"""How a checkpoint is measured, and what it takes to be promoted."""

from pydantic import Field, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig
from nemo_rl_core.config.environment import EnvironmentConfig


class EvaluationConfig(FrozenConfig):
    """Greedy accuracy on every validation prompt, and pass@k from sampled completions.

    `data` is where the prompts come from (its validation rows), and `environment` says what is
    right (a reward of 1 or more); left out, they are those of training.
    """

    num_samples_per_prompt: PositiveInt = 4
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    data: DataConfig | None = None
    environment: EnvironmentConfig | None = None


class PromotionConfig(FrozenConfig):
    """The paired improvement whose lower confidence bound must exceed `min_improvement`."""

    min_improvement: float = Field(default=0.0, ge=-1, le=1)
