"""Start and end of pipelines."""

from typing import NamedTuple

from flytekit import workflow

from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.data.row_kinds import refuse_other_kinds
from tasks.announce import announce
from tasks.artifacts import Checkpoint, Dataset, Evaluation, Lineage, Promotion, Tokenizer
from tasks.cache_reference_logprobs import cache_reference_logprobs
from tasks.convert import convert
from tasks.evaluate import evaluate
from tasks.evaluate_pairs import evaluate_pairs
from tasks.evaluate_questions import evaluate_questions
from tasks.export import export as export_model
from tasks.flyte.local import on_cluster
from tasks.lineage_report import lineage_report
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.promote import promote
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
)
from tasks.recipes.convert import ProofTaskConfig
from tasks.recipes.pairs import PairPlan
from tasks.recipes.verdict import (
    ChooseQuestionsTaskConfig,
    PairVerdictConfig,
    VerdictConfig,
    refuse_missing_verdict,
)
from tasks.release_cluster import release_cluster
from tasks.sample_pairs import sample_pairs
from tasks.stage.stage import dynamic_stage
from tasks.tokenize_pairs import tokenize_pairs
from tasks.train_sft import train_sft


class Start(NamedTuple):
    """Input of a pipeline's algorithm.

    Attributes:
        base: The model before its supervised start.
        validation: Rows of the same data set that are never trained on.
        questions: Rows that models are evaluated on; None if they are not evaluated on answers.
        checkpoint: The model, after its supervised start if the recipe has one.
    """

    base: Checkpoint
    tokenizer: Tokenizer
    train: Dataset
    validation: Dataset
    questions: Dataset | None
    checkpoint: Checkpoint


class Outcome(NamedTuple):
    """Outputs of a pipeline that trains; those of a disabled evaluation are None."""

    model: Checkpoint
    decision: Promotion | None
    before: Evaluation | None
    after: Evaluation | None
    lineage: Lineage


class Questions(NamedTuple):
    """The questions; a tuple, since flytekit takes a single None for a task without outputs."""

    rows: Dataset | None


class Measured(NamedTuple):
    """An evaluation, if there is one."""

    report: Evaluation | None


class Judged(NamedTuple):
    """The evaluation of a trained model, and the decision on its promotion."""

    decision: Promotion | None
    after: Evaluation | None


def validation_input(config: LoopConfig, validation: Dataset) -> dict[str, Dataset]:
    """Returns the held-out rows as an input of a training stage, only if it validates.

    A stage must not run again because of something that it does not read.
    """
    return {"validation": validation} if config.validate_every_num_steps else {}


@dynamic_stage
def warm_start(
    config: SFTTaskConfig, base: Checkpoint, train: Dataset, validation: Dataset
) -> Checkpoint:
    """Runs supervised fine-tuning, if the recipe has it."""
    if config.sft is None:
        return base
    validation_inputs = validation_input(config.sft, validation)
    return train_sft.on(config.cluster)(config=config, base=base, train=train, **validation_inputs)


@dynamic_stage
def choose_questions(
    config: ChooseQuestionsTaskConfig, tokenizer: Tokenizer, train: Dataset, validation: Dataset
) -> Questions:
    """Returns the rows that a model is evaluated on: held-out, from another data set, or none."""
    refuse_other_kinds(train.row_kind, config.trains_on)
    if config.reads_validation:
        refuse_other_kinds(validation.row_kind, config.trains_on, part="validation")
    if not config.evaluates:
        return Questions(None)
    if config.data is not None:
        return Questions(evaluate_questions(config=config.data, tokenizer=tokenizer))
    if validation.row_kind in ("prompts", "lone_prompts"):
        return Questions(validation)
    if config.compares_pairs:
        refuse_other_kinds(validation.row_kind, config.trains_on, part="validation")
    refuse_missing_verdict(config, validation.row_kind)
    return Questions(None)


@dynamic_stage
def measure(
    config: EvaluationTaskConfig | None, checkpoint: Checkpoint, validation: Dataset | None
) -> Measured:
    """Evaluates on the recipe's cluster, if there are questions."""
    if config is None or validation is None:
        return Measured(None)
    stage = evaluate.on(config.cluster, config.dedicated_bundles)
    return Measured(stage(config=config, checkpoint=checkpoint, validation=validation))


@dynamic_stage
def judge(
    config: VerdictConfig,
    start: Checkpoint,
    trained: Checkpoint,
    before: Evaluation | None,
    questions: Dataset | None,
    rows: Dataset,
) -> Judged:
    """Evaluates the trained model, and decides on its promotion.

    The last stage with workers releases the cluster that the run's stages share.
    """
    decision, after = None, None
    if questions is not None and config.evaluation is not None:
        after = evaluate.on(config.evaluation.cluster, config.evaluation.dedicated_bundles)(
            config=config.evaluation, checkpoint=trained, validation=questions
        )
    elif config.pairs is not None:
        after = _measure_pairs(config.pairs, start, trained, rows)
    if config.promotion is not None and after is not None:
        decision = promote(
            config=config.promotion, incumbent=start, candidate=trained, after=after, before=before
        )
    if config.cluster.lifetime == "run" and on_cluster():
        release_cluster(trained=trained, before=before, after=after)
    return Judged(decision, after)


def _measure_pairs(
    config: PairVerdictConfig, start: Checkpoint, trained: Checkpoint, pairs: Dataset
) -> Evaluation:
    logprobs = cache_reference_logprobs.on(config.logprobs.cluster)
    return evaluate_pairs(
        config=config.evaluation,
        checkpoint=trained,
        pairs=pairs,
        start=logprobs(config=config.logprobs, reference=start, pairs=pairs),
        trained=logprobs(config=config.logprobs, reference=trained, pairs=pairs),
    )


@dynamic_stage
def make_pairs(
    config: PairPlan, checkpoint: Checkpoint, tokenizer: Tokenizer, rows: Dataset, iteration: int
) -> Dataset:
    """Returns preference pairs: those of the data, or from the checkpoint's own completions."""
    if config.rollouts is None:
        return tokenize_pairs(tokenizer=tokenizer, rows=rows)
    return sample_pairs.on(config.rollouts.cluster, config.rollouts.dedicated_bundles)(
        config=config.rollouts, checkpoint=checkpoint, prompts=rows, iteration=iteration
    )


@workflow
def begin(
    model: ModelTaskConfig,
    data: DataTaskConfig,
    questions: ChooseQuestionsTaskConfig,
    sft: SFTTaskConfig,
) -> Start:
    """prepare → SFT."""
    prepared = prepare_model(config=model)
    rows = prepare_data(config=data, tokenizer=prepared.tokenizer)
    questions_task = choose_questions(
        config=questions,
        tokenizer=prepared.tokenizer,
        train=rows.train,
        validation=rows.validation,
    ).rows
    checkpoint = warm_start(
        config=sft, base=prepared.base, train=rows.train, validation=rows.validation
    )
    return Start(
        prepared.base, prepared.tokenizer, rows.train, rows.validation, questions_task, checkpoint
    )


@dynamic_stage
def as_transformers(checkpoint: Checkpoint, rows: Dataset) -> Checkpoint:
    """Converts a Megatron checkpoint and verifies the result; returns others unchanged."""
    if checkpoint.backend != "megatron":
        return checkpoint
    return convert(config=ProofTaskConfig(), checkpoint=checkpoint, rows=rows)


@workflow
def conclude(
    verdict: VerdictConfig,
    export: ExportConfig,
    incumbent: Checkpoint,
    before: Evaluation | None,
    candidate: Checkpoint,
    questions: Dataset | None,
    rows: Dataset,
) -> Outcome:
    """convert, where Megatron trained → evaluate → promote → export → lineage → notice."""
    readable = as_transformers(checkpoint=candidate, rows=rows)
    judged = judge(
        config=verdict,
        start=incumbent,
        trained=readable,
        before=before,
        questions=questions,
        rows=rows,
    )
    exported = export_model(
        config=export, start=incumbent, trained=readable, decision=judged.decision
    )
    lineage = lineage_report(model=exported)
    announce(decision=judged.decision, after=judged.after, lineage=lineage)
    return Outcome(exported, judged.decision, before, judged.after, lineage)
