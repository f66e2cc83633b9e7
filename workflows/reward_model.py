"""A reward model, trained on preference pairs and evaluated on held-out ones.

`pyflyte run workflows/reward_model.py reward_model [--config workflows/recipes/NAME.yaml]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset, Evaluation, Lineage
from tasks.evaluate_reward_model import evaluate_reward_model
from tasks.lineage_report import lineage_report
from tasks.plan_tasks.reward_model import plan_reward_model, record_failure
from tasks.recipes.common import default_recipe
from tasks.recipes.reward_model import (
    RewardModelEvaluationTaskConfig,
    RewardModelRecipe,
    RewardModelTaskConfig,
)
from tasks.stage.stage import dynamic_stage
from tasks.train_reward_model import train_reward_model
from workflows.common import Measured, begin, make_pairs, validation_input

DEFAULT = default_recipe(RewardModelRecipe, "reward_model_arithmetic")


class RewardModelOutcome(NamedTuple):
    """Outputs of the pipeline."""

    model: Checkpoint
    report: Evaluation | None
    lineage: Lineage


@dynamic_stage
def learn(
    config: RewardModelTaskConfig, base: Checkpoint, pairs: Dataset, validation: Dataset
) -> Checkpoint:
    """Trains the reward model, with held-out pairs if the recipe validates during training."""
    validation_inputs = validation_input(config.reward_model, validation)
    return train_reward_model.on(config.cluster)(
        config=config, base=base, pairs=pairs, **validation_inputs
    )


@dynamic_stage
def measure_reward_model(
    config: RewardModelEvaluationTaskConfig | None, checkpoint: Checkpoint, pairs: Dataset
) -> Measured:
    """Evaluates on pairs, on the recipe's cluster, unless evaluation is off."""
    if config is None:
        return Measured(None)
    stage = evaluate_reward_model.on(config.cluster)
    return Measured(stage(config=config, checkpoint=checkpoint, pairs=pairs))


@workflow(on_failure=record_failure)
def reward_model(config: RewardModelRecipe = DEFAULT) -> RewardModelOutcome:
    """prepare → SFT → pairs → reward model → accuracy on held-out pairs → lineage."""
    stages = plan_reward_model(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    pairs = make_pairs(
        config=stages.pairs,
        checkpoint=start.checkpoint,
        tokenizer=start.tokenizer,
        rows=start.train,
        iteration=1,
    )
    held_out_pairs = make_pairs(
        config=stages.pairs,
        checkpoint=start.checkpoint,
        tokenizer=start.tokenizer,
        rows=start.validation,
        iteration=1,
    )
    trained = learn(
        config=stages.reward_model, base=start.checkpoint, pairs=pairs, validation=held_out_pairs
    )
    report = measure_reward_model(
        config=stages.evaluation, checkpoint=trained, pairs=held_out_pairs
    ).report
    return RewardModelOutcome(trained, report, lineage_report(model=trained))
