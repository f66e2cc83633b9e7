"""Supervised fine-tuning, measured on prompts with answers, promoted and exported.

`pyflyte run workflows/sft.py sft [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.platform.stage import choice
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes import sft as recipes
from tasks.recipes.common import SFTTaskConfig, default_recipe
from tasks.recipes.sft import SFTRecipe, plan_sft
from tasks.train_sft import train_sft
from workflows.common import Outcome, choose_questions, conclude, held_out, measure

DEFAULT = default_recipe(SFTRecipe, "sft_arithmetic")


@choice
def tune(
    config: SFTTaskConfig, base: Checkpoint, train: Dataset, validation: Dataset
) -> Checkpoint:
    """Supervised fine-tuning, which validates at least after the last step if rows ask nothing.

    It does so whether `evaluation.data` is given or not, so that adding it does not train again.
    """
    assert config.sft is not None, "the recipe always has the section"
    sft = config.sft
    if sft.validate_every_num_steps is None and "prompts" not in validation.row_kind:
        sft = sft.replace(validate_every_num_steps=sft.num_steps)
    seen = held_out(sft, validation)
    return train_sft.on(config.cluster)(
        config=config.replace(sft=sft), base=base, train=train, **seen
    )


@workflow(on_failure=recipes.record_failure)
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
