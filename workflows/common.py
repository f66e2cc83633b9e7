"""How pipelines begin and end."""

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
from tasks.lineage_report import lineage_report
from tasks.platform.local import on_cluster
from tasks.platform.stage import choice
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
from tasks.tokenize_pairs import tokenize_pairs
from tasks.train_sft import train_sft


class Start(NamedTuple):
    """What the algorithm of a pipeline begins with.

    Attributes:
        base: The model before its supervised start.
        tokenizer: Of all models of the run.
        train: Rows to train on.
        validation: Rows of the same data set that are never trained on.
        questions: Rows that models are measured on; None where they are not measured on answers.
        checkpoint: The model, after its supervised start where the recipe has one.
    """

    base: Checkpoint
    tokenizer: Tokenizer
    train: Dataset
    validation: Dataset
    questions: Dataset | None
    checkpoint: Checkpoint


class Outcome(NamedTuple):
    """Outputs of a pipeline that trains; those of an evaluation that is off are None."""

    model: Checkpoint
    decision: Promotion | None
    before: Evaluation | None
    after: Evaluation | None
    lineage: Lineage


class Questions(NamedTuple):
    """The questions; a tuple, since flytekit takes a single None for a task without outputs."""

    rows: Dataset | None


class Measured(NamedTuple):
    """An evaluation, where there is one."""

    report: Evaluation | None


class Judged(NamedTuple):
    """The evaluation of a trained model, and the decision on its promotion."""

    decision: Promotion | None
    after: Evaluation | None


def held_out(config: LoopConfig, validation: Dataset) -> dict[str, Dataset]:
    """The held-out rows as an input of a training stage, which has them only where it validates.

    What a stage does not read must not make it run again.
    """
    return {"validation": validation} if config.validate_every_num_steps else {}


@choice
def warm_start(
    config: SFTTaskConfig, base: Checkpoint, train: Dataset, validation: Dataset
) -> Checkpoint:
    """Supervised fine-tuning, where the recipe has it."""
    if config.sft is None:
        return base
    seen = held_out(config.sft, validation)
    return train_sft.on(config.cluster)(config=config, base=base, train=train, **seen)


@choice
def choose_questions(
    config: ChooseQuestionsTaskConfig, tokenizer: Tokenizer, train: Dataset, validation: Dataset
) -> Questions:
    """The rows that a model is measured on: held-out ones, those of another data set, or none.

    Raises:
        DataError: If the recipe cannot train on the rows.
    """
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


@choice
def measure(
    config: EvaluationTaskConfig | None, checkpoint: Checkpoint, validation: Dataset | None
) -> Measured:
    """An evaluation, on the cluster that the recipe asks for, where there are questions."""
    if config is None or validation is None:
        return Measured(None)
    stage = evaluate.on(config.cluster, config.own_bundles)
    return Measured(stage(config=config, checkpoint=checkpoint, validation=validation))


@choice
def judge(
    config: VerdictConfig,
    start: Checkpoint,
    trained: Checkpoint,
    before: Evaluation | None,
    questions: Dataset | None,
    rows: Dataset,
) -> Judged:
    """Measures the trained model, and decides on its promotion.

    The last stage with workers gives back the cluster that the run's stages have shared.
    """
    decision, after = None, None
    if questions is not None and config.evaluation is not None:
        after = evaluate.on(config.evaluation.cluster, config.evaluation.own_bundles)(
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


@choice
def make_pairs(
    config: PairPlan, checkpoint: Checkpoint, tokenizer: Tokenizer, rows: Dataset, iteration: int
) -> Dataset:
    """Preference pairs: those of the data, or out of the checkpoint's own completions."""
    if config.rollouts is None:
        return tokenize_pairs(tokenizer=tokenizer, rows=rows)
    return sample_pairs.on(config.rollouts.cluster, config.rollouts.own_bundles)(
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
    asked = choose_questions(
        config=questions,
        tokenizer=prepared.tokenizer,
        train=rows.train,
        validation=rows.validation,
    ).rows
    checkpoint = warm_start(
        config=sft, base=prepared.base, train=rows.train, validation=rows.validation
    )
    return Start(prepared.base, prepared.tokenizer, rows.train, rows.validation, asked, checkpoint)


@choice
def as_transformers(checkpoint: Checkpoint, rows: Dataset) -> Checkpoint:
    """A checkpoint that Megatron trained, converted with proof; any other as it is."""
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
