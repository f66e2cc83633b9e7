"""PPO with a critic, from nothing to a model that is measured, promoted and exported.

`pyflyte run workflows/ppo.py ppo [--config workflows/recipes/NAME.yaml]`
"""

from flytekit import dynamic, workflow

from tasks.artifacts import Checkpoint, Dataset
from tasks.evaluate import evaluate
from tasks.experiments.ppo import PPOExperiment, PPOStage, plan_ppo
from tasks.ppo_iteration import ppo_iteration
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.resources import LIGHT
from workflows.common import Outcome, choose_questions, conclude, held_out, warm_start

DEFAULT = PPOExperiment.model_validate({"recipe": "ppo_arithmetic"})


@dynamic(requests=LIGHT)
def iterate(
    config: PPOStage,
    start: Checkpoint,
    train: Dataset,
    validation: Dataset,
    num_iterations: int,
) -> Checkpoint:
    """Iteration after iteration, each cached, policy and critic going on from the one before."""
    checkpoint = start
    for iteration in range(1, num_iterations + 1):
        checkpoint = ppo_iteration(
            config=config,
            start=checkpoint,
            reference=start,
            train=train,
            iteration=iteration,
            **held_out(config.ppo, validation),
        )
    return checkpoint


@workflow
def ppo(config: PPOExperiment = DEFAULT) -> Outcome:
    """prepare → SFT → PPO iterations → evaluate → promote → export → lineage."""
    stages = plan_ppo(config=config)
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
        config=stages.ppo,
        start=start,
        train=data.train,
        validation=data.validation,
        num_iterations=stages.num_iterations,
    )
    return conclude(
        evaluation=stages.evaluation,
        promotion=stages.promotion,
        incumbent=start,
        before=before,
        candidate=candidate,
        validation=questions,
    )
