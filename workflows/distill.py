"""On-policy distillation: a student learns from a teacher, and is compared with its starting point.

`pyflyte run workflows/distill.py distill [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.plan_tasks.distillation import plan_distillation, record_failure
from tasks.prepare_model import prepare_model
from tasks.recipes.common import default_recipe
from tasks.recipes.distillation import DistillationRecipe, DistillationTaskConfig
from tasks.stage.stage import dynamic_stage
from tasks.train_student import train_student
from workflows.common import Outcome, begin, conclude, measure, validation_input, warm_start

DEFAULT = default_recipe(DistillationRecipe, "distill_arithmetic")


@dynamic_stage
def learn(
    config: DistillationTaskConfig,
    student: Checkpoint,
    teacher: Checkpoint,
    train: Dataset,
    validation: Dataset,
) -> Checkpoint:
    """Distills, with held-out prompts if the recipe validates during training."""
    return train_student.on(config.cluster, config.dedicated_bundles)(
        config=config,
        student=student,
        teacher=teacher,
        train=train,
        **validation_input(config.distillation, validation),
    )


@workflow(on_failure=record_failure)
def distill(config: DistillationRecipe = DEFAULT) -> Outcome:
    """prepare → SFT of both → distill → evaluate → promote → export → lineage."""
    stages = plan_distillation(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    prepared = prepare_model(config=stages.teacher)
    teacher = warm_start(
        config=stages.teacher_sft,
        base=prepared.base,
        train=start.train,
        validation=start.validation,
    )
    before = measure(
        config=stages.evaluation, checkpoint=start.checkpoint, validation=start.questions
    ).report
    candidate = learn(
        config=stages.distillation,
        student=start.checkpoint,
        teacher=teacher,
        train=start.train,
        validation=start.validation,
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
