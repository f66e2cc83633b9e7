"""How pipelines begin and end."""

from typing import NamedTuple

from flytekit import workflow

from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.trainer import LoopConfig
from tasks.announce import announce
from tasks.artifacts import Checkpoint, Dataset, Evaluation, Lineage, Promotion, Tokenizer
from tasks.convert import convert
from tasks.evaluate import evaluate
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
    PromotionTaskConfig,
    QuestionTaskConfig,
    SFTTaskConfig,
)
from tasks.recipes.convert import ProofTaskConfig
from tasks.recipes.pairs import PairPlan
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
        questions: Rows that models are measured on.
        checkpoint: The model, after its supervised start where the recipe has one.
    """

    base: Checkpoint
    tokenizer: Tokenizer
    train: Dataset
    validation: Dataset
    questions: Dataset
    checkpoint: Checkpoint


class Outcome(NamedTuple):
    """What a pipeline hands on."""

    model: Checkpoint
    decision: Promotion
    before: Evaluation
    after: Evaluation
    lineage: Lineage


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
    config: QuestionTaskConfig, tokenizer: Tokenizer, validation: Dataset
) -> Dataset:
    """The rows that a model is measured on: held-out ones, or those of another data set."""
    if config.data is None:
        return validation
    return prepare_data(config=config.data, tokenizer=tokenizer).validation


@choice
def measure(
    config: EvaluationTaskConfig,
    checkpoint: Checkpoint,
    validation: Dataset,
    last_after: Evaluation | None = None,
) -> Evaluation:
    """An evaluation, on the cluster that the recipe asks for.

    The last one of a run, which is given the one before training, gives back the cluster that the
    run's stages have shared.
    """
    report = evaluate.on(config.cluster, config.own_bundles)(
        config=config, checkpoint=checkpoint, validation=validation
    )
    if last_after is not None and config.cluster.lifetime == "run" and on_cluster():
        release_cluster(before=last_after, after=report)
    return report


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
    model: ModelTaskConfig, data: DataTaskConfig, questions: QuestionTaskConfig, sft: SFTTaskConfig
) -> Start:
    """prepare → SFT."""
    prepared = prepare_model(config=model)
    rows = prepare_data(config=data, tokenizer=prepared.tokenizer)
    asked = choose_questions(
        config=questions, tokenizer=prepared.tokenizer, validation=rows.validation
    )
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
    evaluation: EvaluationTaskConfig,
    promotion: PromotionTaskConfig,
    export: ExportConfig,
    incumbent: Checkpoint,
    before: Evaluation,
    candidate: Checkpoint,
    validation: Dataset,
) -> Outcome:
    """convert, where Megatron trained → evaluate → promote → export → lineage → notice."""
    readable = as_transformers(checkpoint=candidate, rows=validation)
    after = measure(
        config=evaluation, checkpoint=readable, validation=validation, last_after=before
    )
    decision = promote(
        config=promotion, incumbent=incumbent, candidate=readable, before=before, after=after
    )
    exported = export_model(config=export, start=incumbent, trained=readable, decision=decision)
    lineage = lineage_report(model=exported)
    announce(decision=decision, after=after, lineage=lineage)
    return Outcome(exported, decision, before, after, lineage)
