"""What the recipes of all workflows share, and the records of the stages that they share.

Whatever is wrong with a recipe is refused in a few lines, when it is read.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar

import click
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)

from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.base import FrozenConfig, collecting_contradictions, refuse_unknown_keys
from nemo_rl_core.config.budget import BudgetConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.data import DataConfig, FileData
from nemo_rl_core.config.defaults import (
    LEARNING_RATES,
    DefaultsContext,
    as_sentence,
    defaults_of_pretrained,
    engines_of_gpus,
    filled,
    float32_of_gpus,
    with_judges_of_gpus,
)
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    EnvironmentWorkers,
    own_bundles_of_scorers,
)
from nemo_rl_core.config.evaluation import EvaluationConfig, PromotionConfig
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.config.generation import (
    GenerationConfig,
    SamplingConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig, SmallModel
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import (
    RolloutLimits,
    RolloutSettings,
    TrainerSettings,
    refuse_judge_beside_others,
    refuse_scorers_in_actors,
)
from nemo_rl_core.config.training import DTensorTraining, Head, TrainingConfig
from nemo_rl_core.environments.contents import (
    data_content,
    located_model,
    model_content,
    pinned,
    reward_content,
    with_source,
)
from nemo_rl_core.errors import ConfigError
from tasks.recipes.recipe_file import refuse_unwritable, with_base

_LOG = logging.getLogger(__name__)


class RecipeError(click.ClickException):
    """A recipe that cannot be run, in the form that `pyflyte run` prints without a trace."""

    exit_code = 2


class Recipe(FrozenConfig):
    """Base of a workflow's input: whatever is wrong with it is said in a few lines.

    A key `recipe` names another recipe to begin with: one of `workflows/recipes` by its name, or a
    file. What stands beside it is laid over it, key by key: `{recipe: grpo_arithmetic, seed: 1}`.

    Attributes:
        recipe: Another recipe to begin with: the name of one of `workflows/recipes`, or a file.
        tracking: Where metrics go besides the run's own record.
        budget: What the run may cost.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"recipe"})

    tracking: TrackingConfig = TrackingConfig()
    budget: BudgetConfig = BudgetConfig()

    @property
    def experiments(self) -> "Sequence[Recipe]":
        """The recipes that are checked against this machine before anything starts."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        try:
            with collecting_contradictions():
                if isinstance(value, dict):
                    value = with_base(value)
                    refuse_unwritable(value)
                    # First, since a recipe within a recipe (a sweep's) knows no path from the top.
                    refuse_unknown_keys(cls, value, handler)
                validated: Self = handler(value)
        except ValidationError as error:
            raise RecipeError(str(describe(error, value))) from error
        except ConfigError as error:
            raise RecipeError(str(error)) from error
        return validated


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)

_default_names: dict[int, str] = {}
"""Names of the workflows' defaults, by the id of the recipe, which lives as long as its module."""


def default_recipe(kind: type[AnyRecipe], name: str) -> AnyRecipe:
    """The recipe `name` of `workflows/recipes` as a workflow's default.

    `pyflyte run ... --help` shows it by this name (see `tasks/platform/command_help.py`).
    """
    recipe = kind.model_validate({"recipe": name})
    _default_names[id(recipe)] = name
    return recipe


def default_name(value: object) -> str | None:
    """The name under which `default_recipe` made a recipe; None for everything else."""
    return _default_names.get(id(value))


class PipelineRecipe(Recipe):
    """What every recipe may say; a recipe file holds only what differs from these defaults.

    Attributes:
        seed: Seed of weights, data, sampling and order.
        model: The model to start from.
        data: Where rows come from.
        environment: How a completion is scored, and what answers it.
        environment_workers: Processes that run the environment; None runs it in the trainer's
            process.
        sft: The supervised start; None leaves it out.
        training: The training backend, and how a model is spread over ranks.
        rollouts: Limits of a rollout, and of failures.
        generation: The engine, and how completions are sampled.
        cluster: The shape of the cluster, ranks and threads.
        evaluation: How a checkpoint is evaluated; None evaluates none.
        promotion: How much better a model must be to be promoted; None gives no verdict.
        export: Which model is exported.
    """

    seed: NonNegativeInt = 0
    model: ModelConfig = ModelFromConfig()
    data: DataConfig = ArithmeticData()
    environment: EnvironmentConfig = ExactMatch()
    environment_workers: EnvironmentWorkers | None = None
    sft: SFTConfig | None = None
    training: TrainingConfig = DTensorTraining()
    rollouts: RolloutLimits = RolloutLimits()
    generation: GenerationConfig = VllmGenerationConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    promotion: PromotionConfig | None = PromotionConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _follow_the_model(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(value, dict):
            kept: Self = handler(value)
            return kept
        found: dict[str, Any] = {}
        # What is wrong with the values is said by their validation.
        with suppress(ConfigError, ValidationError):
            found = _chosen_for(cls, laid := with_base(value))
            value = filled(laid, found)
            if _shape(value) != "laptop":
                value = with_judges_of_gpus(value)
        validated: Self = handler(value)
        _tell(found)
        return validated

    @model_validator(mode="after")
    def _engines_and_judges_have_gpus(self) -> Self:
        for sampling, reward, path in self.samplings:
            own = (*sampling.own_bundles, *own_bundles_of_scorers(reward, path))
            self.cluster.refuse_unplaced(own)
            refuse_scorers_in_actors(reward, self.environment_workers)
            refuse_judge_beside_others(self.cluster, sampling, reward)
        return self

    @model_validator(mode="after")
    def _a_promoted_model_has_a_verdict(self) -> Self:
        missing = [name for name in ("evaluation", "promotion") if getattr(self, name) is None]
        if self.export.model == "promoted" and missing:
            raise ConfigError(
                "export.model: promoted needs the verdict of a promotion",
                expected="sections evaluation and promotion, or export.model: trained",
                got=", ".join(f"{name}: null" for name in missing),
                fix=f"leave {' and '.join(missing)} out of the recipe, or export.model",
            )
        return self

    @property
    def trains_on(self) -> tuple[str, ...]:
        """The kinds of rows that the recipe can train on, by `data/row_kinds.py`."""
        return ("prompts", "lone_prompts") if self.sft is None else ("prompts",)

    @property
    def reads_validation(self) -> bool:
        """Whether a stage that trains validates, or measures, on the validation rows of `data`."""
        sections = (getattr(self, name, None) for name in LEARNING_RATES)
        return any(each and each.validate_every_num_steps for each in sections)

    @property
    def compares_pairs(self) -> bool:
        """Whether models are measured on held-out pairs if there are no questions."""
        return False

    @property
    def samples_rows(self) -> bool:
        """Whether a stage other than an evaluation samples completions of rows."""
        return True

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """Of each kind of stage that samples: engines, what scores, and the latter's path."""
        used: list[tuple[SamplingConfig, EnvironmentConfig, str]] = []
        if self.samples_rows:
            used.append((self.generation, self.environment, "environment"))
        if self.evaluation is not None:
            evaluated = self.evaluation.generation or self.generation
            used.append((evaluated, self.measure, self.path_of_measure))
        return used

    @property
    def own_bundles(self) -> tuple[OwnBundles, ...]:
        """What engines and scorers have beside the workers, in the stage in which that is most."""
        found = [
            (*sampling.own_bundles, *own_bundles_of_scorers(reward, path))
            for sampling, reward, path in self.samplings
        ]
        return max(found, key=lambda own: sum(each.number for each in own), default=())

    @property
    def path_of_measure(self) -> str:
        """The path of `measure` in the recipe."""
        is_separate = self.evaluation is not None and self.evaluation.environment is not None
        return "evaluation.environment" if is_separate else "environment"

    @property
    def experiments(self) -> "list[PipelineRecipe]":
        """The experiment itself."""
        return [self]

    @property
    def measure(self) -> EnvironmentConfig:
        """The environment that decides whether a completion is right."""
        separate = None if self.evaluation is None else self.evaluation.environment
        return separate or self.environment

    @property
    def evaluation_data(self) -> DataConfig | None:
        """The section `evaluation.data`, where there is one."""
        return None if self.evaluation is None else self.evaluation.data

    @property
    def question_data(self) -> DataConfig:
        """The section of the rows that models are measured on."""
        return self.evaluation_data or self.data

    @property
    def models(self) -> list[ModelConfig]:
        """Every model that must be there before a run begins."""
        return [self.model]

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """Those of them that an engine of the recipe samples from."""
        return self.models

    @property
    def trained_heads(self) -> list[Head]:
        """The heads with which the recipe trains its model."""
        return ["lm"]

    @property
    def rewards(self) -> list[EnvironmentConfig]:
        """Every environment that must be able to score."""
        return [reward for _, reward, _ in self.samplings]

    def refuse_contradictions(self) -> None:
        """Refuses settings that are right by themselves and do not go together.

        Raises:
            ConfigError: For the first such setting.
        """


def _chosen_for(kind: type[PipelineRecipe], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe leaves to its model: for a pretrained one, by path.

    The shape of the cluster is stated in a recipe, since it is part of the result, and not read off
    the machine that happens to read the recipe.
    """
    model = values.get("model")
    if isinstance(model, BaseModel):
        model = model.model_dump()
    if not isinstance(model, Mapping):
        return {}
    found: dict[str, Any] = {}
    is_pretrained = model.get("kind", "pretrained") == "pretrained"
    dtype = model.get("dtype", "auto" if is_pretrained else "float32")
    if dtype == "auto":
        dtype = "bfloat16" if _shape(values) != "laptop" else "float32"
        found["model.dtype"] = dtype
    if is_pretrained:
        found |= _of_algorithms(kind, {**values, "dtype": dtype})
    return found | _of_gpus(values, dtype)


def _shape(values: Mapping[str, Any]) -> Any:
    cluster = values.get("cluster") or {}
    shape = cluster.get("shape") if isinstance(cluster, Mapping) else cluster.shape
    return shape or "laptop"


def _of_gpus(values: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """What follows from the GPUs of the cluster, whatever the model."""
    cluster, evaluation = values.get("cluster") or {}, values.get("evaluation")
    engines = {"generation": values.get("generation")}
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("generation"), Mapping):
        engines["evaluation.generation"] = evaluation["generation"]
    found: dict[str, Any] = {}
    for path, section in engines.items():
        found |= engines_of_gpus(cluster, section, path=path)
    return found | float32_of_gpus(cluster, values.get("training"), engines, dtype=dtype)


def _of_algorithms(kind: type[PipelineRecipe], values: Mapping[str, Any]) -> dict[str, Any]:
    sections = [""]  # without an algorithm: the length of completions
    for section in LEARNING_RATES:
        field = kind.model_fields.get(section)
        # A stage that a recipe leaves out stays out.
        is_run = isinstance(values.get(section), Mapping) or (
            field is not None and field.default is not None and section not in values
        )
        sections += [section] * (field is not None and is_run)
    found: dict[str, Any] = {}
    for section in sections:
        found |= defaults_of_pretrained(
            values, section=section, samples=True, context=DefaultsContext()
        )
    return found


_told: set[str] = set()


def _tell(found: Mapping[str, Any]) -> None:
    """Logs what was chosen, once a process: a recipe is read several times in a run."""
    sentence = as_sentence(found)
    if found and sentence not in _told:
        _told.add(sentence)
        _LOG.warning("chosen for the recipe's model: %s", sentence)


class ModelTaskConfig(FrozenConfig):
    """What `prepare_model` reads; the seed only where weights are drawn."""

    model: ModelConfig
    content: str
    seed: int | None

    @classmethod
    def of(cls, config: PipelineRecipe) -> "ModelTaskConfig":
        """The recipe's share."""
        seed = config.seed if isinstance(config.model, SmallModel) else None
        model = located_model(config.model)
        return cls(model=model, content=model_content(model), seed=seed)


class DataTaskConfig(FrozenConfig):
    """What `prepare_data` reads; the seed only where rows are drawn or held out.

    Attributes:
        data: Where rows come from; of the hub, with the commit that it has when the run begins.
        content: The digest of files, or of the listing of an object store when the run begins.
        seed: For drawn and held-out rows.
        completions_are_trained: Whether the recipe has a supervised start, so that prompts with
            their completions must fit the model's context.
        read_as: What the columns were taken for. The stage fills it in when it has read them, so
            that it is part of the recorded config.
    """

    data: DataConfig
    content: str
    seed: int | None
    completions_are_trained: bool = False
    read_as: str = ""

    @classmethod
    def of(cls, config: PipelineRecipe) -> "DataTaskConfig":
        """The recipe's share."""
        read_whole = isinstance(config.data, FileData) and config.data.validation is not None
        seed = None if read_whole else config.seed
        return cls(
            data=pinned(config.data),
            content=data_content(config.data),
            seed=seed,
            completions_are_trained=config.sft is not None,
        )


class SFTTaskConfig(TrainerSettings):
    """What `train_sft` reads; without `sft` there is no warm start."""

    sft: SFTConfig | None

    @classmethod
    def of(cls, config: PipelineRecipe) -> "SFTTaskConfig":
        """The recipe's share."""
        return cls(sft=config.sft, **trainer_fields(config))


class EvaluationTaskConfig(RolloutSettings):
    """What `evaluate` reads."""

    reward_content: str
    evaluation: EvaluationConfig

    @classmethod
    def of(cls, config: PipelineRecipe) -> "EvaluationTaskConfig | None":
        """The recipe's share; None where evaluation is off."""
        if config.evaluation is None:
            return None
        sampling = config.evaluation.generation or config.generation
        fields = rollout_fields(
            config.replace(
                environment=config.measure, data=config.question_data, generation=sampling
            )
        )
        del fields["training"]  # evaluation trains nothing, whatever the backend
        # Said once, here and in `ChooseQuestionsTaskConfig`.
        evaluation = config.evaluation.replace(environment=None, data=None, generation=None)
        return cls(evaluation=evaluation, **fields)


class PromotionTaskConfig(FrozenConfig):
    """What `promote` reads."""

    promotion: PromotionConfig
    confidence: float = Field(gt=0.5, lt=1)

    @classmethod
    def of(cls, config: PipelineRecipe) -> "PromotionTaskConfig | None":
        """The recipe's share; None without a verdict."""
        if config.evaluation is None or config.promotion is None:
            return None
        return cls(promotion=config.promotion, confidence=config.evaluation.confidence)


def trainer_fields(config: PipelineRecipe) -> dict[str, Any]:
    """The fields of `TrainerSettings` in a recipe."""
    return {
        "training": with_source(config.training),
        "cluster": config.cluster,
        "dtype": config.model.dtype,
        "seed": config.seed,
    }


def rollout_fields(config: PipelineRecipe) -> dict[str, Any]:
    """The fields of `RolloutSettings` in a recipe, and the content of what scores."""
    return {
        **trainer_fields(config),
        "environment": config.environment,
        "environment_workers": config.environment_workers,
        "reward_content": reward_content(config.environment),
        "generation": with_source(config.generation),
        "rollouts": config.rollouts,
        "max_prompt_tokens": config.data.max_prompt_tokens,
    }
