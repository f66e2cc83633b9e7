"""How a completion is scored."""

from collections.abc import Mapping
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


def judges_of_the_run(config: EnvironmentConfig) -> list[JudgeModel]:
    """The judges that run in workers of the run, not behind an endpoint."""
    return [
        each.judge
        for each in single_environments(config)
        if isinstance(each, LLMJudge) and isinstance(each.judge, JudgeModel)
    ]


def has_reward_model(config: EnvironmentConfig) -> bool:
    """Whether a reward model scores, alone or as a part."""
    return any(isinstance(each, RewardModelScore) for each in single_environments(config))


def reads_reward_model(config: EnvironmentConfig) -> bool:
    """Whether it scores with a reward model that it does not name itself."""
    return any(
        isinstance(each, RewardModelScore) and each.model is None
        for each in single_environments(config)
    )
