"""DPO on given pairs or on the policy's own, measured, promoted and exported.

`pyflyte run workflows/dpo.py dpo [--config workflows/recipes/NAME.yaml]`
"""

from typing import Any

from flytekit import workflow

from tasks.artifacts import Checkpoint, Dataset, Tokenizer
from tasks.cache_reference_logprobs import cache_reference_logprobs
from tasks.dpo_iteration import dpo_iteration
from tasks.platform.stage import choice
from tasks.recipes import dpo as recipes
from tasks.recipes.common import default_recipe
from tasks.recipes.dpo import DPOIterations, DPORecipe, plan_dpo
from workflows.common import Outcome, begin, conclude, make_pairs, measure

DEFAULT = default_recipe(DPORecipe, "dpo_arithmetic")


@choice
def iterate(
    config: DPOIterations,
    start: Checkpoint,
    tokenizer: Tokenizer,
    train: Dataset,
    validation: Dataset,
) -> Checkpoint:
    """Pairs, the reference's logprobs of them, and training on both, iteration after iteration.

    The reference is the model that the first iteration begins with, in all of them.
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
        known: dict[str, Any] = {}
        if config.dpo.dpo.validate_every_num_steps:
            known["validation"] = make_pairs(
                config=config.pairs,
                checkpoint=checkpoint,
                tokenizer=tokenizer,
                rows=validation,
                iteration=iteration,
            )
        if config.dpo.dpo.needs_reference:
            known["logprobs"] = cache_reference_logprobs.on(config.reference.cluster)(
                config=config.reference, reference=start, pairs=pairs
            )
        checkpoint = dpo_iteration.on(config.dpo.cluster)(
            config=config.dpo,
            start=checkpoint,
            reference=start,
            pairs=pairs,
            iteration=iteration,
            **known,
        )
    return checkpoint


@workflow(on_failure=recipes.record_failure)
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
