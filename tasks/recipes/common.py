"""Common parts of the recipes of all workflows, and the configs of the stages that they share.

Mistakes in a recipe are reported in a few lines, when it is read.
"""

import json
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
from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig, collecting_contradictions, refuse_unknown_keys
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.data import DataConfig, FileData
from nemo_rl_core.config.defaults import (
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
    dedicated_bundles_of_scorers,
    is_multi_turn,
)
from nemo_rl_core.config.evaluation import EvaluationConfig, PromotionConfig
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.config.generation import (
    GenerationConfig,
    SamplingConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.config.isolation import IsolationConfig
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import ModelConfig, ModelFromConfig, SmallModel
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.tracking import BudgetConfig, TrackingConfig
from nemo_rl_core.config.trainer import (
    LoopConfig,
    RolloutLimits,
    RolloutSettings,
    TrainerSettings,
    algorithm_of,
    refuse_busy_judge_gpu,
    refuse_isolation_without_actors,
    refuse_scorers_in_actors,
)
from nemo_rl_core.config.training import DTensorTraining, Head, TrainingConfig
from nemo_rl_core.errors import ConfigError
from tasks.recipes.recipe_file import refuse_unwritable, with_base

_LOG = logging.getLogger(__name__)


class RecipeError(click.ClickException):
    """A recipe that cannot be run, in the form that `pyflyte run` prints without a trace."""

    exit_code = 2


class Recipe(FrozenConfig):
    """Base of a workflow's input, which reports mistakes in a few lines.

    A key `recipe` names a base recipe: one of `workflows/recipes` by its name, or a
    file. The other keys are merged into it, key by key: `{recipe: grpo_arithmetic, seed: 1}`.

    Attributes:
        recipe: Base recipe: the name of one of `workflows/recipes`, or a file.
        tracking: Trackers of metrics in addition to the history.
        budget: Limit of the run's cost.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"recipe"})

    tracking: TrackingConfig = TrackingConfig()
    budget: BudgetConfig = BudgetConfig()

    @property
    def experiments(self) -> "Sequence[PipelineRecipe]":
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
                    # First, since a nested recipe (that of a sweep) does not know its path.
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
    """Returns the recipe `name` of `workflows/recipes`, as a workflow's default.

    `pyflyte run ... --help` shows it by this name (see `tasks/local_run/command_help.py`).
    """
    recipe = kind.model_validate({"recipe": name})
    _default_names[id(recipe)] = name
    return recipe


def default_name(value: object) -> str | None:
    """Returns the name with which `default_recipe` made a recipe; None for other values."""
    return _default_names.get(id(value))


class PipelineRecipe(Recipe):
    """Settings of every pipeline; a recipe file only needs those that differ from the defaults.

    Attributes:
        seed: Seed of weights, data, sampling and order.
        model: The model to start from.
        data: Source of the rows.
        environment: How completions are scored and answered.
        environment_workers: Processes that run the environment; None runs it in the trainer's
            process.
        isolation: Packages of components whose workers do not use the project's versions.
        sft: The supervised start; None leaves it out.
        training: The training backend, and how a model is sharded over ranks.
        rollouts: Limits of a rollout, and of failures.
        generation: The engine, and how completions are sampled.
        cluster: The shape of the cluster, ranks and threads.
        evaluation: How a checkpoint is evaluated; None evaluates none.
        promotion: Required improvement for a promotion; None gives no verdict.
        export: Which model is exported.
    """

    seed: NonNegativeInt = 0
    model: ModelConfig = ModelFromConfig()
    data: DataConfig = ArithmeticData()
    environment: EnvironmentConfig = ExactMatch()
    environment_workers: EnvironmentWorkers | None = None
    isolation: IsolationConfig = IsolationConfig()
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
    def _fill_in_defaults(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(value, dict):
            unchanged: Self = handler(value)
            return unchanged
        chosen: dict[str, Any] = {}
        # Validation reports problems of the values.
        with suppress(ConfigError, ValidationError):
            chosen = _chosen_settings(cls, merged := with_base(value))
            value = filled(merged, chosen)
            if _shape(value) != "laptop":
                value = with_judges_of_gpus(value)
        validated: Self = handler(value)
        _log_choices(chosen)
        return validated

    @model_validator(mode="after")
    def _engines_and_judges_have_gpus(self) -> Self:
        for sampling, reward, path in self.samplings:
            bundles = (*sampling.dedicated_bundles, *dedicated_bundles_of_scorers(reward, path))
            self.cluster.refuse_unplaced(bundles)
            refuse_scorers_in_actors(reward, self.environment_workers)
            refuse_isolation_without_actors(self.isolation, self.environment_workers)
            refuse_busy_judge_gpu(self.cluster, sampling, reward)
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
        """Kinds of rows that the recipe can train on; see `data/row_kinds.py`."""
        return ("prompts", "lone_prompts") if self.sft is None else ("prompts",)

    @property
    def reads_validation(self) -> bool:
        """Whether a stage that trains validates, or measures, on the validation rows of `data`."""
        sections = (section for _, section in self if isinstance(section, LoopConfig))
        return any(section.validate_every_num_steps for section in sections)

    @property
    def compares_pairs(self) -> bool:
        """Whether models are measured on held-out pairs if questions are missing."""
        return False

    @property
    def samples_rows(self) -> bool:
        """Whether a stage other than an evaluation samples completions of rows."""
        return True

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """Engines, scoring environment and its path, for each kind of stage that samples."""
        used: list[tuple[SamplingConfig, EnvironmentConfig, str]] = []
        if self.samples_rows:
            used.append((self.generation, self.environment, "environment"))
        if self.evaluation is not None:
            evaluated = self.evaluation.generation or self.generation
            used.append((evaluated, self.evaluation_environment, self.evaluation_environment_path))
        return used

    @property
    def dedicated_bundles(self) -> tuple[DedicatedBundles, ...]:
        """Bundles of engines and scorers besides the workers, in the stage that needs most."""
        by_stage = [
            (*sampling.dedicated_bundles, *dedicated_bundles_of_scorers(reward, path))
            for sampling, reward, path in self.samplings
        ]
        return max(by_stage, key=lambda bundles: sum(each.number for each in bundles), default=())

    @property
    def evaluation_environment_path(self) -> str:
        """Path of `evaluation_environment` in the recipe."""
        is_separate = self.evaluation is not None and self.evaluation.environment is not None
        return "evaluation.environment" if is_separate else "environment"

    @property
    def experiments(self) -> "list[PipelineRecipe]":
        """The recipe itself."""
        return [self]

    @property
    def evaluation_environment(self) -> EnvironmentConfig:
        """The environment that decides whether a completion is right."""
        separate = None if self.evaluation is None else self.evaluation.environment
        return separate or self.environment

    @property
    def evaluation_data(self) -> DataConfig | None:
        """The section `evaluation.data`, if there is one."""
        return None if self.evaluation is None else self.evaluation.data

    @property
    def question_data(self) -> DataConfig:
        """The section of the rows that models are measured on."""
        return self.evaluation_data or self.data

    @property
    def models(self) -> list[ModelConfig]:
        """Models that must exist before a run begins."""
        return [self.model]

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """Models that an engine of the recipe samples from."""
        return self.models

    @property
    def trained_heads(self) -> list[Head]:
        """Heads with which the recipe trains its model."""
        return ["lm"]

    @property
    def rewards(self) -> list[EnvironmentConfig]:
        """Environments that must be able to score."""
        return [reward for _, reward, _ in self.samplings]

    def refuse_contradictions(self) -> None:
        """Refuses settings that are valid by themselves but contradict each other.

        Raises:
            ConfigError: For the first such setting.
        """


def _chosen_settings(kind: type[PipelineRecipe], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults, by path, for settings that a recipe with a pretrained model omits.

    The recipe states the shape of the cluster, since it is part of the result; it is not derived
    from the machine that reads the recipe.
    """
    model = values.get("model")
    if isinstance(model, BaseModel):
        model = model.model_dump()
    if not isinstance(model, Mapping):
        return {}
    chosen: dict[str, Any] = {}
    is_pretrained = model.get("kind", "pretrained") == "pretrained"
    dtype = model.get("dtype", "auto" if is_pretrained else "float32")
    if dtype == "auto":
        dtype = "bfloat16" if _shape(values) != "laptop" else "float32"
        chosen["model.dtype"] = dtype
    if is_pretrained:
        chosen |= _algorithm_settings(kind, {**values, "dtype": dtype})
    return chosen | _gpu_settings(values, dtype)


def _shape(values: Mapping[str, Any]) -> Any:
    cluster = values.get("cluster") or {}
    shape = cluster.get("shape") if isinstance(cluster, Mapping) else cluster.shape
    return shape or "laptop"


def _gpu_settings(values: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    cluster, evaluation = values.get("cluster") or {}, values.get("evaluation")
    engines = {"generation": values.get("generation")}
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("generation"), Mapping):
        engines["evaluation.generation"] = evaluation["generation"]
    chosen: dict[str, Any] = {}
    for path, section in engines.items():
        chosen |= engines_of_gpus(cluster, section, path=path)
    return chosen | float32_of_gpus(cluster, values.get("training"), engines, dtype=dtype)


def _algorithm_settings(kind: type[PipelineRecipe], values: Mapping[str, Any]) -> dict[str, Any]:
    algorithms: list[Algorithm | None] = [None]  # for the length of completions
    for section, field in kind.model_fields.items():
        # A stage that a recipe leaves out stays out.
        is_run = isinstance(values.get(section), Mapping) or (
            field.default is not None and section not in values
        )
        algorithm = algorithm_of(kind, section)
        if algorithm is not None and is_run:
            algorithms.append(algorithm)
    chosen: dict[str, Any] = {}
    for algorithm in algorithms:
        chosen |= defaults_of_pretrained(
            values, algorithm=algorithm, samples=True, context=DefaultsContext()
        )
    return chosen


_logged: set[str] = set()


def _log_choices(chosen: Mapping[str, Any]) -> None:
    """Logs the chosen settings once per process: a recipe is read several times in a run."""
    sentence = as_sentence(chosen)
    if chosen and sentence not in _logged:
        _logged.add(sentence)
        _LOG.warning("chosen for the recipe's model: %s", sentence)


class ModelTaskConfig(FrozenConfig):
    """Config of `prepare_model`; it has the seed only if weights are drawn."""

    model: ModelConfig
    content: str
    seed: int | None

    @classmethod
    def of(cls, config: PipelineRecipe) -> "ModelTaskConfig":
        """Extracts the config from a recipe."""
        from nemo_rl_core.environments.contents import located_model, model_content

        seed = config.seed if isinstance(config.model, SmallModel) else None
        model = located_model(config.model)
        return cls(model=model, content=model_content(model), seed=seed)


class DataTaskConfig(FrozenConfig):
    """Config of `prepare_data`; it has the seed only if rows are drawn or held out.

    Attributes:
        data: Source of the rows; for the hub, with the commit at the start of the run.
        content: Digest of files, or of the listing of an object store, at the start of the run.
        seed: Seed for drawn and held-out rows.
        completions_are_trained: Whether the recipe has a supervised start, so that prompts with
            their completions must fit the model's context.
        read_as: How the columns were interpreted. The stage sets it when it has read them, so that
            it is part of the recorded config.
    """

    data: DataConfig
    content: str
    seed: int | None
    completions_are_trained: bool = False
    read_as: str = ""

    @classmethod
    def of(cls, config: PipelineRecipe) -> "DataTaskConfig":
        """Extracts the config from a recipe."""
        from nemo_rl_core.environments.contents import data_content, pinned

        has_both_parts = isinstance(config.data, FileData) and config.data.validation is not None
        seed = None if has_both_parts else config.seed
        return cls(
            data=pinned(config.data),
            content=data_content(config.data),
            seed=seed,
            completions_are_trained=config.sft is not None,
        )


class SFTTaskConfig(TrainerSettings):
    """Config of `train_sft`; without `sft` nothing is fine-tuned.

    Attributes:
        tools: Tools of the environment, which prompts show, by task, as JSON.
    """

    sft: SFTConfig | None
    tools: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)

    @classmethod
    def of(cls, config: PipelineRecipe) -> "SFTTaskConfig":
        """Extracts the config from a recipe; asks an MCP server for its tools."""
        fields = trainer_fields(config, sft=config.sft)
        if config.sft is not None and is_multi_turn(config.environment):
            from nemo_rl_core.rollouts.prompts import tools_by_task

            by_task = tools_by_task(config.environment)
            fields["tools"] = {task: json.dumps(tools) for task, tools in by_task.items() if tools}
        return cls(**fields)


class EvaluationTaskConfig(RolloutSettings):
    """Config of `evaluate`."""

    reward_content: str
    evaluation: EvaluationConfig

    @classmethod
    def of(cls, config: PipelineRecipe) -> "EvaluationTaskConfig | None":
        """Extracts the config from a recipe; None if evaluation is off."""
        if config.evaluation is None:
            return None
        sampling = config.evaluation.generation or config.generation
        fields = rollout_fields(
            config.replace(
                environment=config.evaluation_environment,
                data=config.question_data,
                generation=sampling,
            )
        )
        del fields["training"]  # evaluation trains nothing, whatever the backend
        fields["isolation"] = fields["isolation"].only("environment", "generation")
        # Recorded elsewhere: the data in `ChooseQuestionsTaskConfig`, the others as fields of this.
        evaluation = config.evaluation.replace(environment=None, data=None, generation=None)
        return cls(evaluation=evaluation, **fields)


class PromotionTaskConfig(FrozenConfig):
    """Config of `promote`."""

    promotion: PromotionConfig
    confidence: float = Field(gt=0.5, lt=1)

    @classmethod
    def of(cls, config: PipelineRecipe) -> "PromotionTaskConfig | None":
        """Extracts the config from a recipe; None without a verdict."""
        if config.evaluation is None or config.promotion is None:
            return None
        return cls(promotion=config.promotion, confidence=config.evaluation.confidence)


def trainer_fields(config: PipelineRecipe, **sections: FrozenConfig | None) -> dict[str, Any]:
    """Returns the fields of `TrainerSettings` in a recipe.

    Args:
        **sections: Sections of algorithms; the sources of their functions are added.
    """
    from nemo_rl_core.distributed.isolation import with_packages
    from nemo_rl_core.environments.contents import with_source

    return {
        "training": with_source(config.training),
        "cluster": config.cluster,
        "dtype": config.model.dtype,
        "seed": config.seed,
        "isolation": with_packages(config.isolation.only("training")),
        **{name: section and with_source(section) for name, section in sections.items()},
    }


def rollout_fields(config: PipelineRecipe, **sections: FrozenConfig | None) -> dict[str, Any]:
    """Returns the fields of `RolloutSettings` in a recipe, with the content of its rewards.

    Args:
        **sections: Sections of algorithms; see `trainer_fields`.
    """
    from nemo_rl_core.distributed.isolation import with_packages
    from nemo_rl_core.environments.contents import reward_content, with_source

    return {
        **trainer_fields(config, **sections),
        "environment": config.environment,
        "environment_workers": config.environment_workers,
        "reward_content": reward_content(config.environment),
        "generation": with_source(config.generation),
        "isolation": with_packages(config.isolation),
        "rollouts": config.rollouts,
        "max_prompt_tokens": config.data.max_prompt_tokens,
    }
