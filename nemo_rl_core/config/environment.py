"""How a completion is scored."""

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

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.multi_turn import (
    GuessNumberGame,
    PythonEnvironment,
    SlidingPuzzleGame,
    ToolUse,
)
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.single_turn import (
    AnySingle,
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
)


class WeightedPart(FrozenConfig):
    """One of several rewards.

    Attributes:
        weight: The factor of this reward in the sum.
        environment: How this reward is computed.
    """

    weight: FiniteFloat = 1.0
    environment: SingleEnvironmentConfig


class WeightedSum(FrozenConfig):
    """Several rewards, weighted and summed; the advantage `gdpo` reads them apart.

    Its parts are no sums themselves: a sum of sums is one longer sum, and Flyte, which describes a
    config's fields by following them, has no end of a type that contains itself.

    Attributes:
        parts: The rewards that are summed.
    """

    kind: Literal["weighted_sum"] = "weighted_sum"
    parts: list[WeightedPart] = Field(min_length=1)


_MultiTurn = SlidingPuzzleGame | GuessNumberGame | ToolUse | PythonEnvironment
MultiTurnConfig = Annotated[_MultiTurn, Field(discriminator="kind")]
"""Environments that answer, so that the policy has several turns."""


class TaskEnvironment(FrozenConfig):
    """The environment of the rows of one task.

    Attributes:
        task: The value of `task` in the rows that this environment scores.
        environment: The environment of these rows.
    """

    task: str = Field(min_length=1)
    environment: Annotated[AnySingle | _MultiTurn | WeightedSum, Field(discriminator="kind")]


class ByTask(FrozenConfig):
    """Several environments in one run: each row goes to that of its `task`.

    Attributes:
        tasks: One environment for each task of the data.
    """

    kind: Literal["by_task"] = "by_task"
    tasks: list[TaskEnvironment] = Field(min_length=1)

    @model_validator(mode="after")
    def _tasks_differ(self) -> "ByTask":
        names = [each.task for each in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"a task has one environment, but {names} names one twice")
        reads_ids = any(isinstance(e, RewardModelScore) for e in single_environments(self))
        if reads_ids and answers_back(self):
            raise ValueError(
                "a reward model reads token ids, which an environment with several turns does not "
                "see: have them in different runs"
            )
        return self


EnvironmentConfig = Annotated[
    AnySingle | _MultiTurn | WeightedSum | ByTask, Field(discriminator="kind")
]


class EnvironmentWorkers(FrozenConfig):
    """Actors that an environment runs in, so that one that hangs or dies takes no run with it.

    Attributes:
        num_workers: How many run side by side.
        rows_per_call: The most rows that one gets at a time. Not derived from `num_workers`, so
            that scores do not depend on that.
        call_timeout_seconds: For one call. Past it the actor is killed and replaced, and each of
            its rows is tried once more, alone.
        use_gpus: Whether each gets a share of one of the trainer's GPUs, for rewards that compute
            with a model; without it they see no GPU. Reward models of a recipe get one in any case.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "call_timeout_seconds"}

    num_workers: PositiveInt = 1
    rows_per_call: PositiveInt = 8
    call_timeout_seconds: PositiveFloat = 120.0
    use_gpus: bool = False


def single_environments(config: EnvironmentConfig) -> list[SingleEnvironmentConfig]:
    """The environments that score on their own: of all parts and tasks, or the one that there is.

    What answers, such as games and tools, is not among them.
    """
    match config:
        case WeightedSum(parts=parts):
            return [part.environment for part in parts]
        case ByTask(tasks=tasks):
            return [one for each in tasks for one in single_environments(each.environment)]
        case SlidingPuzzleGame() | GuessNumberGame() | ToolUse() | PythonEnvironment():
            return []
        case _:
            return [config]


def multi_turn_environments(config: EnvironmentConfig) -> list[MultiTurnConfig]:
    """The environments that answer: of all tasks, or the one that there is."""
    if isinstance(config, ByTask):
        return [one for each in config.tasks for one in multi_turn_environments(each.environment)]
    return [config] if isinstance(config, _MultiTurn) else []


def answers_back(config: EnvironmentConfig) -> bool:
    """Whether the policy may have several turns."""
    return bool(multi_turn_environments(config))


def reward_names(config: EnvironmentConfig) -> list[str]:
    """What the parts of a weighted sum are called in metrics; nothing for other environments."""
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
        name: Of its workers, which all scorers of the same settings share.
        config: Its section.
        path: Of that section in the recipe.
        max_new_tokens: Of a judge's reply; None of a reward model.
    """

    name: str
    config: JudgeModel | RewardModelScore
    path: str
    max_new_tokens: int | None = None

    @property
    def own_bundles(self) -> tuple[OwnBundles, ...]:
        """Its bundles besides the trainer's; none for one that shares those."""
        return self.config.own_bundles(self.name, self.path)


def model_scorers(config: EnvironmentConfig, path: str = "environment") -> list[ModelScorer]:
    """The judges and reward models that score in workers of the run, one for each section.

    Args:
        config: The section.
        path: Of the section in the recipe.

    Example:
        >>> both = [RewardModelScore(model="a"), RewardModelScore(model="b")]
        >>> config = WeightedSum(parts=[{"environment": each} for each in both])
        >>> [(each.name, each.path) for each in model_scorers(config)][1]
        ('reward-model-2', 'environment.parts.1.environment')
    """
    names: dict[tuple[JudgeModel | RewardModelScore, int | None], str] = {}
    found = []
    for place, each in _placed(config, path):
        match each:
            case LLMJudge(judge=JudgeModel() as model):
                found.append(_named(names, "judge", model, f"{place}.judge", each.max_new_tokens))
            case RewardModelScore():
                found.append(_named(names, "reward-model", each, place, None))
    return found


def _named(
    names: dict[tuple[JudgeModel | RewardModelScore, int | None], str],
    kind: str,
    config: JudgeModel | RewardModelScore,
    path: str,
    max_new_tokens: int | None,
) -> ModelScorer:
    number = 1 + sum(name.startswith(kind) for name in names.values())
    name = kind if number == 1 else f"{kind}-{number}"
    return ModelScorer(
        names.setdefault((config, max_new_tokens), name), config, path, max_new_tokens
    )


def _placed(
    config: EnvironmentConfig, path: str
) -> Iterator[tuple[str, SingleEnvironmentConfig | MultiTurnConfig]]:
    """The environments without parts, each with its path."""
    inner: list[tuple[str, EnvironmentConfig]]
    match config:
        case WeightedSum(parts=parts):
            inner = [(f"{path}.parts.{n}", part.environment) for n, part in enumerate(parts)]
        case ByTask(tasks=tasks):
            inner = [(f"{path}.tasks.{n}", each.environment) for n, each in enumerate(tasks)]
        case _:
            yield path, config
            return
    for place, each in inner:
        yield from _placed(each, f"{place}.environment")


def own_bundles_of_scorers(
    config: EnvironmentConfig, path: str = "environment"
) -> tuple[OwnBundles, ...]:
    """What models that score have besides the trainer's bundles, once for each group of workers.

    Args:
        config: The section.
        path: Of the section in the recipe.
    """
    found = [own for each in model_scorers(config, path) for own in each.own_bundles]
    return tuple(dict.fromkeys(found))


def judges_of_the_run(config: EnvironmentConfig) -> list[JudgeModel]:
    """The judges that run in workers of the run, not behind an endpoint."""
    return [each.config for each in model_scorers(config) if isinstance(each.config, JudgeModel)]


def has_reward_model(config: EnvironmentConfig) -> bool:
    """Whether a reward model scores, alone or as a part."""
    return any(isinstance(each, RewardModelScore) for each in single_environments(config))


def reads_reward_model(config: EnvironmentConfig) -> bool:
    """Whether it scores with a reward model that it does not name itself."""
    return any(
        isinstance(each, RewardModelScore) and each.model is None
        for each in single_environments(config)
    )
