"""Supervised fine-tuning, evaluated on prompts with answers, promoted and exported.

`pyflyte run workflows/sft.py sft [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.plan_tasks.sft import plan_sft, record_failure
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes.common import SFTTaskConfig, default_recipe
from tasks.recipes.sft import SFTRecipe
from tasks.stage.stage import dynamic_stage
from tasks.train_sft import train_sft
from workflows.common import Outcome, choose_questions, conclude, measure, validation_input

DEFAULT = default_recipe(SFTRecipe, "sft_arithmetic")


@dynamic_stage
def tune(
    config: SFTTaskConfig, base: Checkpoint, train: Dataset, validation: Dataset
) -> Checkpoint:
    """Fine-tunes, and validates at least after the last step if the rows have no questions.

    Validation does not depend on `evaluation.data`, so adding that section does not train again.
    """
    assert config.sft is not None, "the recipe always has the section"
    sft = config.sft
    if sft.validate_every_num_steps is None and "prompts" not in validation.row_kind:
        sft = sft.replace(validate_every_num_steps=sft.num_steps)
    validation_inputs = validation_input(sft, validation)
    return train_sft.on(config.cluster)(
        config=config.replace(sft=sft), base=base, train=train, **validation_inputs
    )


@workflow(on_failure=record_failure)
def sft(config: SFTRecipe = DEFAULT) -> Outcome:
    """prepare → SFT → evaluate → promote → export → lineage."""
    stages = plan_sft(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    questions = choose_questions(
        config=stages.questions,
        tokenizer=model.tokenizer,
        train=data.train,
        validation=data.validation,
    ).rows
    before = measure(config=stages.evaluation, checkpoint=model.base, validation=questions).report
    candidate = tune(
        config=stages.sft, base=model.base, train=data.train, validation=data.validation
    )
    return conclude(
        verdict=stages.verdict,
        export=stages.export,
        incumbent=model.base,
        before=before,
        candidate=candidate,
        questions=questions,
        rows=data.validation,
    )
