"""Settings of the stages that measure the models of a run and decide on a promotion."""

import logging

from pydantic import Field

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.data.row_kinds import described_kind
from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    PipelineRecipe,
    PromotionTaskConfig,
)
from tasks.recipes.pairs import ReferenceTaskConfig

_LOG = logging.getLogger(f"nemo_rl_core.{__name__}")  # prefix of the run's log


class QuestionsTaskConfig(FrozenConfig):
    """Settings of `evaluate_questions`."""

    questions: DataTaskConfig


class ChooseQuestionsTaskConfig(FrozenConfig):
    """Settings of `choose_questions`.

    Attributes:
        evaluates: Whether models are measured on questions.
        data: The data set of the questions; None asks held-out rows of the recipe's data.
        trains_on: The kinds of rows that the recipe can train on.
        reads_validation: Whether the validation rows must be of these kinds, too.
        compares_pairs: Whether held-out pairs give the verdict if questions are missing.
        needs_verdict: Whether the export depends on a verdict.
    """

    evaluates: bool
    data: QuestionsTaskConfig | None
    trains_on: list[str]
    reads_validation: bool
    compares_pairs: bool
    needs_verdict: bool

    @classmethod
    def of(cls, config: PipelineRecipe) -> "ChooseQuestionsTaskConfig":
        """Extracts the config from a recipe."""
        data = config.evaluation_data
        questions = None
        if data is not None:
            questions = DataTaskConfig.of(config.replace(data=data))
            questions = questions.replace(completions_are_trained=False)
        return cls(
            evaluates=config.evaluation is not None,
            data=None if questions is None else QuestionsTaskConfig(questions=questions),
            trains_on=list(config.trains_on),
            reads_validation=config.reads_validation,
            compares_pairs=config.compares_pairs,
            needs_verdict=config.export.model == "promoted",
        )


def refuse_missing_verdict(config: ChooseQuestionsTaskConfig, kind: str) -> None:
    """Logs that no answers are evaluated, or raises if the export needs them."""
    words = described_kind(kind)
    if config.needs_verdict and not config.compares_pairs:
        raise ConfigError(
            "export.model: promoted needs the verdict of a promotion",
            expected="questions to measure the model on",
            got=f"{words}, and no evaluation.data",
            fix="name a data set of questions, evaluation.data, or leave export.model out",
        )
    pairs = "held-out pairs give the verdict; " if config.compares_pairs else ""
    _LOG.warning(
        "no answers are evaluated: the data are %s; %sevaluation.data names questions to ask",
        words,
        pairs,
    )


class PairEvaluationTaskConfig(FrozenConfig):
    """Settings of `evaluate_pairs`.

    Attributes:
        per_token: Whether logprobs are averaged over a completion's tokens, and not summed.
        confidence: Level of the interval.
    """

    per_token: bool
    confidence: float = Field(gt=0.5, lt=1)


class PairVerdictConfig(FrozenConfig):
    """Settings of a verdict on held-out pairs: logprobs, and the decision."""

    logprobs: ReferenceTaskConfig
    evaluation: PairEvaluationTaskConfig


class VerdictConfig(FrozenConfig):
    """Settings of the stages that measure a trained model and decide on its promotion."""

    cluster: ClusterConfig
    evaluation: EvaluationTaskConfig | None
    promotion: PromotionTaskConfig | None
    pairs: PairVerdictConfig | None = None

    @classmethod
    def of(cls, config: PipelineRecipe, pairs: PairVerdictConfig | None = None) -> "VerdictConfig":
        """Extracts the config from a recipe."""
        return cls(
            cluster=config.cluster,
            evaluation=EvaluationTaskConfig.of(config),
            promotion=PromotionTaskConfig.of(config),
            pairs=pairs,
        )
