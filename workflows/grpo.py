"""GRPO, from a base model to an evaluated, promoted and exported one.

`pyflyte run workflows/grpo.py grpo [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from nemo_rl_core.config.environment import reads_reward_model
from tasks.artifacts import Checkpoint, Dataset
from tasks.evaluate import evaluate
from tasks.grpo_iteration import grpo_iteration
from tasks.plan_tasks.grpo import plan_grpo, record_failure
from tasks.recipes.common import EvaluationTaskConfig, default_recipe
from tasks.recipes.grpo import GRPORecipe, GRPOTaskConfig
from tasks.stage.stage import dynamic_stage
from workflows.common import Outcome, begin, conclude, measure, validation_input

DEFAULT = default_recipe(GRPORecipe, "grpo_arithmetic")


@dynamic_stage
def iterate(
    config: GRPOTaskConfig,
    start: Checkpoint,
    train: Dataset,
    validation: Dataset,
    num_iterations: int,
    reward_model: Checkpoint | None = None,
) -> Checkpoint:
    """Runs iteration after iteration, each cached, each from the previous checkpoint."""
    inputs = {"reward_model": reward_model} if reads_reward_model(config.environment) else {}
    checkpoint = start
    for iteration in range(1, num_iterations + 1):
        checkpoint = grpo_iteration.on(config.cluster, config.dedicated_bundles)(
            config=config,
            start=checkpoint,
            reference=start,
            train=train,
            iteration=iteration,
            **inputs,
            **validation_input(config.grpo, validation),
        )
    return checkpoint


@dynamic_stage
def measure_base(
    config: EvaluationTaskConfig | None, base: Checkpoint, validation: Dataset | None
) -> None:
    """Evaluates the model before its supervised start, if the recipe says so."""
    if config is not None and validation is not None:
        evaluate.on(config.cluster, config.dedicated_bundles)(
            config=config, checkpoint=base, validation=validation
        )


@workflow(on_failure=record_failure)
def grpo(config: GRPORecipe = DEFAULT) -> Outcome:
    """prepare → SFT → GRPO iterations → evaluate → promote → export → lineage."""
    stages = plan_grpo(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    measure_base(config=stages.base_evaluation, base=start.base, validation=start.questions)
    before = measure(
        config=stages.evaluation, checkpoint=start.checkpoint, validation=start.questions
    ).report
    candidate = iterate(
        config=stages.grpo,
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
