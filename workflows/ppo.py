"""PPO with a critic, from a base model to an evaluated, promoted and exported one.

`pyflyte run workflows/ppo.py ppo [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.plan_tasks.ppo import plan_ppo, record_failure
from tasks.ppo_iteration import ppo_iteration
from tasks.recipes.common import default_recipe
from tasks.recipes.ppo import PPORecipe, PPOTaskConfig
from tasks.stage.stage import dynamic_stage
from workflows.common import Outcome, begin, conclude, measure, validation_input

DEFAULT = default_recipe(PPORecipe, "ppo_arithmetic")


@dynamic_stage
def iterate(
    config: PPOTaskConfig,
    start: Checkpoint,
    train: Dataset,
    validation: Dataset,
    num_iterations: int,
) -> Checkpoint:
    """Runs iteration after iteration, each cached, each from the previous policy and critic."""
    checkpoint = start
    for iteration in range(1, num_iterations + 1):
        checkpoint = ppo_iteration.on(config.cluster, config.dedicated_bundles)(
            config=config,
            start=checkpoint,
            reference=start,
            train=train,
            iteration=iteration,
            **validation_input(config.ppo, validation),
        )
    return checkpoint


@workflow(on_failure=record_failure)
def ppo(config: PPORecipe = DEFAULT) -> Outcome:
    """prepare → SFT → PPO iterations → evaluate → promote → export → lineage."""
    stages = plan_ppo(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    before = measure(
        config=stages.evaluation, checkpoint=start.checkpoint, validation=start.questions
    ).report
    candidate = iterate(
        config=stages.ppo,
        start=start.checkpoint,
        train=start.train,
        validation=start.validation,
        num_iterations=stages.num_iterations,
    )
    return conclude(
        verdict=stages.verdict,
        export=stages.export,
        incumbent=start.checkpoint,
        before=before,
        candidate=candidate,
        questions=start.questions,
        rows=start.validation,
    )
