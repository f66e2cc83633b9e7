"""Complete post-training in one command: SFT, reward model, DPO, GRPO, evaluation, export.

`pyflyte run workflows/post_train.py post_train [--config workflows/recipes/NAME.yaml]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint, Evaluation, Lineage, Promotion
from tasks.plan_tasks.post_train import plan_post_train, record_failure
from tasks.recipes.common import default_recipe
from tasks.recipes.post_train import PostTrainRecipe
from workflows import dpo, grpo, reward_model
from workflows.common import begin, conclude, make_pairs, measure

DEFAULT = default_recipe(PostTrainRecipe, "post_train_arithmetic")


class PostTrainOutcome(NamedTuple):
    """Outputs of the pipeline; `before` is measured after SFT, `between` after DPO."""

    model: Checkpoint
    reward_model: Checkpoint
    reward_model_report: Evaluation | None
    decision: Promotion | None
    before: Evaluation | None
    between: Evaluation | None
    after: Evaluation | None
    lineage: Lineage


@workflow(on_failure=record_failure)
def post_train(config: PostTrainRecipe = DEFAULT) -> PostTrainOutcome:
    """prepare → SFT → pairs → reward model → DPO → GRPO → evaluate → promote → export."""
    stages = plan_post_train(config=config)
    start = begin(model=stages.model, data=stages.data, questions=stages.questions, sft=stages.sft)
    before = measure(
        config=stages.evaluation, checkpoint=start.checkpoint, validation=start.questions
    ).report

    pairs = make_pairs(
        config=stages.pairs,
        checkpoint=start.checkpoint,
        tokenizer=start.tokenizer,
        rows=start.train,
        iteration=1,
    )
    held_out_pairs = make_pairs(
        config=stages.pairs,
        checkpoint=start.checkpoint,
        tokenizer=start.tokenizer,
        rows=start.validation,
        iteration=1,
    )
    rm_checkpoint = reward_model.learn(
        config=stages.reward_model, base=start.checkpoint, pairs=pairs, validation=held_out_pairs
    )
    rm_evaluation = reward_model.measure_reward_model(
        config=stages.reward_model_evaluation, checkpoint=rm_checkpoint, pairs=held_out_pairs
    ).report

    preferred = dpo.iterate(
        config=stages.dpo,
        start=start.checkpoint,
        tokenizer=start.tokenizer,
        train=start.train,
        validation=start.validation,
    )
    between = measure(
        config=stages.evaluation, checkpoint=preferred, validation=start.questions
    ).report
    candidate = grpo.iterate(
        config=stages.grpo,
        start=preferred,
        train=start.train,
        validation=start.validation,
        num_iterations=stages.num_grpo_iterations,
        reward_model=rm_checkpoint,
    )
    ended = conclude(
        verdict=stages.verdict,
        export=stages.export,
        incumbent=start.checkpoint,
        before=before,
        candidate=candidate,
        questions=start.questions,
        rows=start.validation,
    )
    return PostTrainOutcome(
        ended.model,
        rm_checkpoint,
        rm_evaluation,
        ended.decision,
        ended.before,
        between,
        ended.after,
        ended.lineage,
    )
