"""On-policy distillation: a student learns from a teacher, and is measured against itself.

`pyflyte run workflows/distill.py distill [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import dynamic, workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.evaluate import evaluate
from tasks.experiments.distillation import (
    DistillationExperiment,
    DistillationStage,
    plan_distillation,
)
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.resources import LIGHT
from tasks.train_student import train_student
from workflows.common import Outcome, choose_questions, conclude, held_out, warm_start

DEFAULT = DistillationExperiment.model_validate({"recipe": "distill_arithmetic"})


@dynamic(requests=LIGHT)
def learn(
    config: DistillationStage,
    student: Checkpoint,
    teacher: Checkpoint,
    train: Dataset,
    validation: Dataset,
) -> Checkpoint:
    """Distillation, with held-out prompts where the recipe validates on the way."""
    return train_student(
        config=config,
        student=student,
        teacher=teacher,
        train=train,
        **held_out(config.distillation, validation),
    )


@workflow
def distill(config: DistillationExperiment = DEFAULT) -> Outcome:
    """prepare → SFT of both → distill → evaluate → promote → export → lineage."""
    stages = plan_distillation(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    questions = choose_questions(
        config=stages.questions, tokenizer=model.tokenizer, validation=data.validation
    )
    taught = prepare_model(config=stages.teacher)
    teacher = warm_start(
        config=stages.teacher_sft, base=taught.base, train=data.train, validation=data.validation
    )
    start = warm_start(
        config=stages.sft, base=model.base, train=data.train, validation=data.validation
    )
    before = evaluate(config=stages.evaluation, checkpoint=start, validation=questions)
    candidate = learn(
        config=stages.distillation,
        student=start,
        teacher=teacher,
        train=data.train,
        validation=data.validation,
    )
    return conclude(
        evaluation=stages.evaluation,
        promotion=stages.promotion,
        incumbent=start,
        before=before,
        candidate=candidate,
        validation=questions,
    )
