"""DPO on given pairs or on the policy's own, evaluated, promoted and exported.

`pyflyte run workflows/dpo.py dpo [--config workflows/recipes/NAME.yaml]`
"""

from typing import Any

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset, Tokenizer
from tasks.cache_reference_logprobs import cache_reference_logprobs
from tasks.dpo_iteration import dpo_iteration
from tasks.plan_tasks.dpo import plan_dpo, record_failure
from tasks.recipes.common import default_recipe
from tasks.recipes.dpo import DPOIterations, DPORecipe
from tasks.stage.stage import dynamic_stage
from workflows.common import Outcome, begin, conclude, make_pairs, measure

DEFAULT = default_recipe(DPORecipe, "dpo_arithmetic")


@dynamic_stage
def iterate(
    config: DPOIterations,
    start: Checkpoint,
    tokenizer: Tokenizer,
    train: Dataset,
    validation: Dataset,
) -> Checkpoint:
    """Makes pairs, computes the reference's logprobs, and trains, iteration after iteration.

    The reference is the start of the first iteration, in every iteration.
    """
    checkpoint = start
    for iteration in range(1, config.num_iterations + 1):
        pairs = make_pairs(
            config=config.pairs,
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            rows=train,
            iteration=iteration,
        )
        optional_inputs: dict[str, Any] = {}
        if config.dpo.dpo.validate_every_num_steps:
            optional_inputs["validation"] = make_pairs(
                config=config.pairs,
                checkpoint=checkpoint,
                tokenizer=tokenizer,
                rows=validation,
                iteration=iteration,
            )
        if config.dpo.dpo.needs_reference:
            optional_inputs["logprobs"] = cache_reference_logprobs.on(config.reference.cluster)(
                config=config.reference, reference=start, pairs=pairs
            )
        checkpoint = dpo_iteration.on(config.dpo.cluster)(
            config=config.dpo,
            start=checkpoint,
            reference=start,
            pairs=pairs,
            iteration=iteration,
            **optional_inputs,
        )
    return checkpoint


@workflow(on_failure=record_failure)
def dpo(config: DPORecipe = DEFAULT) -> Outcome:
    """prepare → SFT → n times (pairs → reference logprobs → DPO) → evaluate → promote → export."""
    stages = plan_dpo(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    before = measure(
        config=stages.evaluation, checkpoint=start.checkpoint, validation=start.questions
    ).report
    candidate = iterate(
        config=stages.iterations,
        start=start.checkpoint,
        tokenizer=start.tokenizer,
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
