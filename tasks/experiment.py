"""The recipe of a GRPO run, and which stage reads what of it.

Each stage takes a record with exactly the fields it reads, so that Flyte's cache key is exactly
its true input: another learning rate for GRPO leaves data and supervised checkpoint as they are.
"""

from typing import Any, NamedTuple

from flytekit import task
from pydantic import Field, NonNegativeInt

from nemo_rl_core.algorithms.grpo.config import GRPOSchedule, GRPOSettings
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.data import ArithmeticData, DataConfig
from nemo_rl_core.config.environment import EnvironmentConfig, ExactMatch
from nemo_rl_core.config.evaluation import EvaluationConfig, PromotionConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.config.training import TrainingConfig
from tasks.contents import data_content, model_content, reward_content
from tasks.recipe import Recipe
from tasks.resources import LIGHT


class GRPOExperiment(Recipe):
    """All of a GRPO run; a recipe file holds only what differs from these defaults."""

    seed: NonNegativeInt = 0
    model: ModelConfig = ModelFromConfig()
    data: DataConfig = ArithmeticData()
    environment: EnvironmentConfig = ExactMatch()
    sft: SFTConfig | None = None
    grpo: GRPOSchedule = GRPOSchedule()
    training: TrainingConfig = TrainingConfig()
    generation: GenerationConfig = GenerationConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    promotion: PromotionConfig = PromotionConfig()


class ModelStage(FrozenConfig):
    """What `prepare_model` reads; the seed only where weights are drawn."""

    model: ModelConfig
    content: str
    seed: int | None


class DataStage(FrozenConfig):
    """What `prepare_data` reads."""

    data: DataConfig
    content: str
    seed: int


class SFTStage(TrainerSettings):
    """What `train_sft` reads; without `sft` there is no warm start."""

    sft: SFTConfig | None


class GRPOStage(GRPOSettings):
    """What `grpo_iteration` reads."""

    reward_content: str


class EvaluationStage(RolloutSettings):
    """What `evaluate` reads."""

    reward_content: str
    evaluation: EvaluationConfig


class PromotionStage(FrozenConfig):
    """What `promote` reads."""

    promotion: PromotionConfig
    confidence: float = Field(gt=0.5, lt=1)
    seed: int


class GRPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    sft: SFTStage
    grpo: GRPOStage
    num_iterations: int
    evaluation: EvaluationStage
    promotion: PromotionStage


@task(requests=LIGHT)
def plan(config: GRPOExperiment) -> GRPOPlan:
    """Deals the recipe out to the stages."""
    shared: dict[str, Any] = {
        "cluster": config.cluster,
        "dtype": config.model.dtype,
        "seed": config.seed,
    }
    rollouts: dict[str, Any] = {
        "environment": config.environment,
        "reward_content": reward_content(config.environment),
        "generation": config.generation,
        "max_prompt_tokens": config.data.max_prompt_tokens,
    }
    seed = config.seed if config.model.kind == "from_config" else None
    return GRPOPlan(
        model=ModelStage(model=config.model, content=model_content(config.model), seed=seed),
        data=DataStage(data=config.data, content=data_content(config.data), seed=config.seed),
        sft=SFTStage(sft=config.sft, training=config.training, **shared),
        grpo=GRPOStage(grpo=config.grpo.iteration, training=config.training, **rollouts, **shared),
        num_iterations=config.grpo.num_iterations,
        evaluation=EvaluationStage(evaluation=config.evaluation, **rollouts, **shared),
        promotion=PromotionStage(
            promotion=config.promotion,
            confidence=config.evaluation.confidence,
            seed=config.seed,
        ),
    )
