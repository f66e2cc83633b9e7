"""DPO on given pairs or on the policy's own, measured, promoted and exported.

`pyflyte run workflows/dpo.py dpo [--config workflows/recipes/NAME.yaml]`
"""

from typing import Any

from flytekit import dynamic, workflow

from tasks.artifacts import Checkpoint, Dataset, Tokenizer
from tasks.cache_reference_logprobs import cache_reference_logprobs
from tasks.dpo_iteration import dpo_iteration
from tasks.evaluate import evaluate
from tasks.experiments.dpo import DPOExperiment, DPOIterations, plan_dpo
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.resources import LIGHT
from workflows.common import Outcome, choose_questions, conclude, make_pairs, warm_start

DEFAULT = DPOExperiment.model_validate({"recipe": "dpo_arithmetic"})


@dynamic(requests=LIGHT)
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
            known["logprobs"] = cache_reference_logprobs(
                config=config.reference, reference=start, pairs=pairs
            )
        checkpoint = dpo_iteration(
            config=config.dpo,
            start=checkpoint,
            reference=start,
            pairs=pairs,
            iteration=iteration,
            **known,
        )
    return checkpoint


@workflow
def dpo(config: DPOExperiment = DEFAULT) -> Outcome:
    """prepare → SFT → n times (pairs → reference logprobs → DPO) → evaluate → promote → export."""
    stages = plan_dpo(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    questions = choose_questions(
        config=stages.questions, tokenizer=model.tokenizer, validation=data.validation
    )
    start = warm_start(
        config=stages.sft, base=model.base, train=data.train, validation=data.validation
    )
    before = evaluate(config=stages.evaluation, checkpoint=start, validation=questions)
    candidate = iterate(
        config=stages.iterations,
        start=start,
        tokenizer=model.tokenizer,
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
