"""Settings of environments, which score completions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.multi_turn import (
    GuessNumberGame,
    PythonEnvironment,
    SlidingPuzzleGame,
    ToolUse,
)
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import (
    AnySingle,
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
)


class WeightedPart(FrozenConfig):
    """One of several rewards.

    Attributes:
        weight: Factor of this reward in the sum.
        environment: Environment that computes this reward.
    """

    weight: FiniteFloat = 1.0
    environment: SingleEnvironmentConfig


class WeightedSum(FrozenConfig):
    """Weighted sum of several rewards; the advantage `gdpo` reads them separately.

    A part cannot be a sum itself: a sum of sums is one longer sum, and Flyte, which follows a
    config's fields to describe it, cannot describe a type that contains itself.

    Attributes:
        parts: The rewards in the sum.
    """

    kind: Literal["weighted_sum"] = "weighted_sum"
    parts: list[WeightedPart] = Field(min_length=1)


_MultiTurn = SlidingPuzzleGame | GuessNumberGame | ToolUse | PythonEnvironment
MultiTurnConfig = Annotated[_MultiTurn | AgentEnvironment, Field(discriminator="kind")]
"""Environments in which the policy has several turns."""


class TaskEnvironment(FrozenConfig):
    """The environment of the rows of one task.

    Attributes:
        task: The value of `task` in the rows that this environment scores.
        environment: The environment of these rows.
    """

    task: str = Field(min_length=1)
    environment: Annotated[AnySingle | _MultiTurn | WeightedSum, Field(discriminator="kind")]


class ByTask(FrozenConfig):
    """Several environments in one run, chosen by the `task` of each row.

    Attributes:
        tasks: One environment for each task of the data.
    """

    kind: Literal["by_task"] = "by_task"
    tasks: list[TaskEnvironment] = Field(min_length=1)

    @model_validator(mode="after")
    def _tasks_differ(self) -> "ByTask":
        names = [each.task for each in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"each task needs one environment, but {names} repeats a task")
        reads_ids = any(isinstance(e, RewardModelScore) for e in single_environments(self))
        if reads_ids and is_multi_turn(self):
            raise ValueError(
                "a reward model reads token ids, which an environment with several turns does not "
                "get: use them in different runs"
            )
        return self


EnvironmentConfig = Annotated[
    AnySingle | _MultiTurn | AgentEnvironment | WeightedSum | ByTask, Field(discriminator="kind")
]


class EnvironmentWorkers(FrozenConfig):
    """Actors that run an environment, so that a hang or crash does not end the run.

    Attributes:
        num_workers: Number of actors.
        rows_per_call: Maximum number of rows per call. It does not depend on `num_workers`, so that
            scores do not either.
        call_timeout_seconds: Time limit of one call. After it the actor is killed and replaced, and
            each of its rows is retried separately.
        use_gpus: Whether each actor gets a fraction of one of the trainer's GPUs, for rewards that
            use a model; otherwise actors see no GPU. Reward models of a recipe always get one.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "call_timeout_seconds"}

    num_workers: PositiveInt = 1
    rows_per_call: PositiveInt = 8
    call_timeout_seconds: PositiveFloat = 120.0
    use_gpus: bool = False


def single_environments(config: EnvironmentConfig) -> list[SingleEnvironmentConfig]:
    """Returns the single-turn environments of all parts and tasks; for tools, of the answer."""
    match config:
        case WeightedSum(parts=parts):
            return [part.environment for part in parts]
        case ByTask(tasks=tasks):
            return [one for each in tasks for one in single_environments(each.environment)]
        case ToolUse(answer=answer):
            return [answer]
        case SlidingPuzzleGame() | GuessNumberGame() | PythonEnvironment():
            return []
        case AgentEnvironment(reward=reward):
            return [] if reward is None else [reward]
        case _:
            return [config]


def environments_of_task(config: EnvironmentConfig, task: str) -> list[SingleEnvironmentConfig]:
    """Returns the environments that score a task's rows; for tools, that of the last turn."""
    if isinstance(config, ByTask):
        matching = [each.environment for each in config.tasks if each.task == task]
        return [one for each in matching for one in environments_of_task(each, task)]
    return single_environments(config)


def grader_version(config: EnvironmentConfig, task: str) -> int:
    """Returns the version of the grader of a task's rows; 1 if it has none."""
    scored_by = environments_of_task(config, task)
    return max((getattr(each, "version", 1) for each in scored_by), default=1)


def multi_turn_environments(config: EnvironmentConfig) -> list[MultiTurnConfig]:
    """Returns the multi-turn environments of all tasks."""
    if isinstance(config, ByTask):
        return [one for each in config.tasks for one in multi_turn_environments(each.environment)]
    return [config] if isinstance(config, _MultiTurn | AgentEnvironment) else []


def is_multi_turn(config: EnvironmentConfig) -> bool:
    """Whether the policy may have several turns."""
    return bool(multi_turn_environments(config))


def reward_names(config: EnvironmentConfig) -> list[str]:
    """Returns the metric names of a weighted sum's parts; empty for other environments."""
    if not isinstance(config, WeightedSum):
        return []
    environments = [part.environment for part in config.parts]
    return [
        each.target.partition(":")[2] if isinstance(each, RewardFunction) else each.kind
        for each in environments
    ]


@dataclass(frozen=True)
class ModelScorer:
    """A model that scores in workers of the run.

    Attributes:
        name: Name of its workers, which all scorers with the same settings share.
        max_new_tokens: Maximum length of a judge's reply; None for a reward model.
    """

    name: str
    config: JudgeModel | RewardModelScore
    path: str
    max_new_tokens: int | None = None

    @property
    def dedicated_bundles(self) -> tuple[DedicatedBundles, ...]:
        """Its dedicated bundles; empty if it shares the trainer's."""
        return self.config.dedicated_bundles(self.name, self.path)


def model_scorers(config: EnvironmentConfig, path: str = "environment") -> list[ModelScorer]:
    """Returns the judges and reward models that score in workers of the run, one per section.

    Example:
        >>> both = [RewardModelScore(model="a"), RewardModelScore(model="b")]
        >>> config = WeightedSum(parts=[{"environment": each} for each in both])
        >>> [(each.name, each.path) for each in model_scorers(config)][1]
        ('reward-model-2', 'environment.parts.1.environment')
    """
    names: dict[tuple[JudgeModel | RewardModelScore, int | None], str] = {}
    scorers = []
    for inner_path, each in _with_paths(config, path):
        model: JudgeModel | RewardModelScore
        limit: int | None
        match each:
            case LLMJudge(judge=JudgeModel() as model, max_new_tokens=limit):
                kind, model_path = "judge", f"{inner_path}.judge"
            case RewardModelScore():
                kind, model, model_path, limit = "reward-model", each, inner_path, None
            case _:
                continue
        number = 1 + sum(name.startswith(kind) for name in names.values())
        name = names.setdefault((model, limit), kind if number == 1 else f"{kind}-{number}")
        scorers.append(ModelScorer(name, model, model_path, limit))
    return scorers


def _with_paths(
    config: EnvironmentConfig, path: str
) -> Iterator[tuple[str, SingleEnvironmentConfig | MultiTurnConfig]]:
    inner: list[tuple[str, EnvironmentConfig]]
    match config:
        case WeightedSum(parts=parts):
            inner = [(f"{path}.parts.{n}", part.environment) for n, part in enumerate(parts)]
        case ByTask(tasks=tasks):
            inner = [(f"{path}.tasks.{n}", each.environment) for n, each in enumerate(tasks)]
        case AgentEnvironment(reward=reward) if reward is not None:
            yield f"{path}.reward", reward
            return
        case _:
            yield path, config
            return
    for inner_path, each in inner:
        yield from _with_paths(each, f"{inner_path}.environment")


def dedicated_bundles_of_scorers(
    config: EnvironmentConfig, path: str = "environment"
) -> tuple[DedicatedBundles, ...]:
    """Returns the dedicated bundles of scorers, once for each group of workers."""
    scorers = model_scorers(config, path)
    return tuple(dict.fromkeys(bundles for each in scorers for bundles in each.dedicated_bundles))


def judges_of_the_run(config: EnvironmentConfig) -> list[JudgeModel]:
    """Returns the judges in workers of the run, without those at an endpoint."""
    return [each.config for each in model_scorers(config) if isinstance(each.config, JudgeModel)]


def has_reward_model(config: EnvironmentConfig) -> bool:
    """Whether a reward model scores, by itself or as a part."""
    return any(isinstance(each, RewardModelScore) for each in single_environments(config))


def reads_reward_model(config: EnvironmentConfig) -> bool:
    """Whether it uses the reward model of the pipeline, which has no name in the section."""
    return any(
        isinstance(each, RewardModelScore) and each.model is None
        for each in single_environments(config)
    )
