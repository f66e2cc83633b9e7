"""Supervised fine-tuning, measured on prompts with answers, promoted and exported.

`pyflyte run workflows/sft.py sft [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import workflow

from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes import sft as recipes
from tasks.recipes.common import default_recipe
from tasks.recipes.sft import SFTRecipe, plan_sft
from workflows.common import Outcome, choose_questions, conclude, measure, warm_start

DEFAULT = default_recipe(SFTRecipe, "sft_arithmetic")


@workflow(on_failure=recipes.record_failure)
def sft(config: SFTRecipe = DEFAULT) -> Outcome:
    """prepare → SFT → evaluate → promote → export → lineage."""
    stages = plan_sft(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    questions = choose_questions(
        config=stages.questions, tokenizer=model.tokenizer, validation=data.validation
    )
    before = measure(config=stages.evaluation, checkpoint=model.base, validation=questions)
    candidate = warm_start(
        config=stages.sft, base=model.base, train=data.train, validation=data.validation
    )
    return conclude(
        evaluation=stages.evaluation,
        promotion=stages.promotion,
        export=stages.export,
        incumbent=model.base,
        before=before,
        candidate=candidate,
        validation=questions,
    )
