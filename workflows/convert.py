"""A transformers model as a Megatron checkpoint, verified by converting it back.

`pyflyte run workflows/convert.py convert_model [--config RECIPE]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint
from tasks.convert import convert
from tasks.plan_tasks.convert import plan_convert, record_failure
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes.common import default_recipe
from tasks.recipes.convert import ConvertRecipe
from tasks.to_megatron import to_megatron

DEFAULT = default_recipe(ConvertRecipe, "convert_arithmetic")


class Converted(NamedTuple):
    """Both layouts of one model."""

    megatron: Checkpoint
    transformers: Checkpoint


@workflow(on_failure=record_failure)
def convert_model(config: ConvertRecipe = DEFAULT) -> Converted:
    """prepare → to Megatron → back, with proof."""
    stages = plan_convert(config=config)
    model = prepare_model(config=stages.model)
    rows = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    megatron = to_megatron(config=stages.megatron, checkpoint=model.base)
    transformers = convert(config=stages.proof, checkpoint=megatron, rows=rows.validation)
    return Converted(megatron, transformers)
