"""GRPO from nothing to a model that is measured, promoted and exported.

`pyflyte run workflows/grpo.py grpo [--config workflows/recipes/NAME.yaml]`
"""

from typing import NamedTuple

from flytekit import dynamic, workflow

from tasks.artifacts import Checkpoint, Dataset, Evaluation, Lineage, Promotion
from tasks.evaluate import evaluate
from tasks.experiments.common import SFTStage
from tasks.experiments.grpo import GRPOExperiment, GRPOStage, plan_grpo
from tasks.export import export
from tasks.grpo_iteration import grpo_iteration
from tasks.lineage_report import lineage_report
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.promote import promote
from tasks.resources import LIGHT
from tasks.train_sft import train_sft

DEFAULT = GRPOExperiment.model_validate({"recipe": "grpo_arithmetic"})


class GRPOOutcome(NamedTuple):
    """What a run hands on."""

    model: Checkpoint
    decision: Promotion
    before: Evaluation
    after: Evaluation
    lineage: Lineage


@dynamic(requests=LIGHT)
def warm_start(config: SFTStage, base: Checkpoint, train: Dataset) -> Checkpoint:
    """Supervised fine-tuning, where the recipe has it."""
    if config.sft is None:
        return base
    return train_sft(config=config, base=base, train=train)


@dynamic(requests=LIGHT)
def iterate(
    config: GRPOStage, start: Checkpoint, train: Dataset, num_iterations: int
) -> Checkpoint:
    """Iteration after iteration, each cached, each from the checkpoint of the one before."""
    checkpoint = start
    for iteration in range(1, num_iterations + 1):
        checkpoint = grpo_iteration(
            config=config, start=checkpoint, reference=start, train=train, iteration=iteration
        )
    return checkpoint


@workflow
def grpo(config: GRPOExperiment = DEFAULT) -> GRPOOutcome:
    """prepare → SFT → GRPO iterations → evaluate → promote → export → lineage."""
    stages = plan_grpo(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    start = warm_start(config=stages.sft, base=model.base, train=data.train)
    before = evaluate(config=stages.evaluation, checkpoint=start, validation=data.validation)
    candidate = iterate(
        config=stages.grpo, start=start, train=data.train, num_iterations=stages.num_iterations
    )
    after = evaluate(config=stages.evaluation, checkpoint=candidate, validation=data.validation)
    promoted = promote(
        config=stages.promotion, incumbent=start, candidate=candidate, before=before, after=after
    )
    exported = export(checkpoint=promoted.checkpoint, decision=promoted.decision)
    lineage = lineage_report(model=exported)
    return GRPOOutcome(exported, promoted.decision, before, after, lineage)
