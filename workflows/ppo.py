"""PPO with a critic, from nothing to a model that is measured, promoted and exported.

`pyflyte run workflows/ppo.py ppo [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.platform.stage import choice
from tasks.ppo_iteration import ppo_iteration
from tasks.recipes import ppo as recipes
from tasks.recipes.common import default_recipe
from tasks.recipes.ppo import PPORecipe, PPOTaskConfig, plan_ppo
from workflows.common import Outcome, begin, conclude, held_out, measure

DEFAULT = default_recipe(PPORecipe, "ppo_arithmetic")


@choice
def iterate(
    config: PPOTaskConfig,
    start: Checkpoint,
    train: Dataset,
    validation: Dataset,
    num_iterations: int,
) -> Checkpoint:
    """Iteration after iteration, each cached, policy and critic going on from the one before."""
    checkpoint = start
    for iteration in range(1, num_iterations + 1):
        checkpoint = ppo_iteration.on(config.cluster, config.own_bundles)(
            config=config,
            start=checkpoint,
            reference=start,
            train=train,
            iteration=iteration,
            **held_out(config.ppo, validation),
        )
    return checkpoint


@workflow(on_failure=recipes.record_failure)
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
