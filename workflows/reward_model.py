"""A reward model, from preference pairs to its accuracy on pairs that it has not seen.

`pyflyte run workflows/reward_model.py reward_model [--config workflows/recipes/NAME.yaml]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint, Evaluation, Lineage
from tasks.evaluate_reward_model import evaluate_reward_model
from tasks.experiments.reward_model import RewardModelExperiment, plan_reward_model
from tasks.lineage_report import lineage_report
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.train_reward_model import train_reward_model
from workflows.common import make_pairs, warm_start

DEFAULT = RewardModelExperiment.model_validate({"recipe": "reward_model_arithmetic"})


class RewardModelOutcome(NamedTuple):
    """What the pipeline hands on."""

    model: Checkpoint
    report: Evaluation
    lineage: Lineage


@workflow
def reward_model(config: RewardModelExperiment = DEFAULT) -> RewardModelOutcome:
    """prepare → SFT → pairs → reward model → accuracy on held-out pairs → lineage."""
    stages = plan_reward_model(config=config)
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    start = warm_start(config=stages.sft, base=model.base, train=data.train)
    pairs = make_pairs(
        config=stages.pairs,
        checkpoint=start,
        tokenizer=model.tokenizer,
        rows=data.train,
        iteration=1,
    )
    held_out = make_pairs(
        config=stages.pairs,
        checkpoint=start,
        tokenizer=model.tokenizer,
        rows=data.validation,
        iteration=1,
    )
    trained = train_reward_model(config=stages.reward_model, base=start, pairs=pairs)
    report = evaluate_reward_model(config=stages.evaluation, checkpoint=trained, pairs=held_out)
    return RewardModelOutcome(trained, report, lineage_report(model=trained))
