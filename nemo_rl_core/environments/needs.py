"""Checks before anything is sampled: what a config names, and the columns that it needs."""

from collections.abc import Callable, Iterable, Sequence

from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    WeightedSum,
    multi_turn_environments,
    single_environments,
)
from nemo_rl_core.config.multi_turn import PythonEnvironment, ToolUse
from nemo_rl_core.config.single_turn import (
    CodeTests,
    ExactMatch,
    MathVerify,
    MultipleChoice,
    RewardFunction,
)
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.loading import load_function
from nemo_rl_core.environments.rewards.row_fields import field_names, fields_of
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.environments.targets import find_environment
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.types import Prompt, unscored

MissingColumns = Callable[[Prompt], Sequence[str]]
"""The columns without which the row of a prompt cannot be scored, and which it lacks.

It raises RewardError for a row that cannot be scored for another reason.
"""

_NUM_NAMED_ROWS = 5


def missing_columns(config: EnvironmentConfig) -> MissingColumns:
    """What the environment of a config needs of a row; makes none, and starts nothing.

    Raises:
        ConfigError: When a reward function cannot be imported.
    """
    match config:
        case ToolUse(answer=answer):
            return missing_columns(answer)
        case RewardFunction(target=target):
            return FunctionalRewardWrapper.from_target(target).missing_columns
        case WeightedSum(parts=parts):
            needs = [missing_columns(part.environment) for part in parts]
            return lambda prompt: list(
                dict.fromkeys(name for need in needs for name in need(prompt))
            )
        case ByTask(tasks=tasks):
            by_task = {each.task: missing_columns(each.environment) for each in tasks}
            return lambda prompt: by_task.get(prompt.task, no_columns)(prompt)
    return _NEEDS.get(type(config), no_columns)


def check_targets(config: EnvironmentConfig) -> None:
    """Imports the user's functions and environments that a config names; makes none of them.

    Raises:
        ConfigError: For the first that is not there, or is neither.
    """
    for single in single_environments(config):
        if isinstance(single, RewardFunction):
            load_function(single.target)
    for answers in multi_turn_environments(config):
        if isinstance(answers, PythonEnvironment):
            find_environment(answers)


def refuse_incomplete_rows(
    prompts: Iterable[Prompt], scored_by: Scorer | EnvironmentConfig, *, name: str
) -> None:
    """Refuses rows that cannot be scored.

    Args:
        prompts: The rows, in their order.
        scored_by: What will score them.
        name: Of the data set, such as `train`.

    Raises:
        DataError: Names the columns, the rows (counted from 0), and the columns that there are; or
            the rows and why they cannot be scored.
    """
    if isinstance(scored_by, Scorer):
        missing: MissingColumns = scored_by.missing_columns
        scorer = "reward_fn"
    else:
        missing = missing_columns(scored_by)
        scorer = f"the environment {scored_by.kind!r}"
    if missing is no_columns:
        return
    lacking: dict[str, list[int]] = {}
    wrong: dict[int, RewardError] = {}
    first: Prompt | None = None
    num_rows = 0
    for index, prompt in enumerate(prompts):
        num_rows += 1
        try:
            columns = missing(prompt)
        except RewardError as error:
            wrong[index] = error
            continue
        for column in columns:
            first = first or prompt
            lacking.setdefault(column, []).append(index)
    if wrong:
        raise _wrong_rows(wrong, num_rows, name)
    if first is None:
        return
    columns = " and the column ".join(lacking)
    raise DataError(
        f"the {name} data set lacks the column {columns}, which {scorer} needs",
        expected=f"the column {columns} in every row",
        got="; ".join(f"{column}: {_rows(rows, num_rows)}" for column, rows in lacking.items())
        + f". Columns that there are: {', '.join(field_names(fields_of(unscored(first))))}",
        fix="add the column to the data, or choose a reward that needs none"
        + (
            ""
            if list(lacking) == ["answer"]
            else "; a parameter with a default needs none, and one named as above takes that column"
        ),
    )


def _wrong_rows(wrong: dict[int, RewardError], num_rows: int, name: str) -> DataError:
    """Returns one error for all wrong rows, with the fix of the first."""
    first, *_ = wrong.values()
    reasons = [f"row {index}: {wrong[index].got}" for index in list(wrong)[:_NUM_NAMED_ROWS]]
    more = ["..."] if len(wrong) > _NUM_NAMED_ROWS else []
    return DataError(
        f"{len(wrong)} of {num_rows} rows of the {name} data set cannot be scored: {first.problem}",
        expected=first.expected,
        got="; ".join([*reasons, *more]),
        fix=first.fix,
    )


def _unit_tests(prompt: Prompt) -> Sequence[str]:
    UnitTests.of(prompt.metadata).check_names()
    return ()


def _answer(prompt: Prompt) -> Sequence[str]:
    return () if prompt.answer else ("answer",)


_NEEDS: dict[type, MissingColumns] = {
    ExactMatch: _answer,
    MathVerify: _answer,
    MultipleChoice: _answer,
    CodeTests: _unit_tests,
}


def no_columns(_: Prompt) -> Sequence[str]:
    """What an environment needs that reads texts alone, or says itself what a row lacks."""
    return ()


def _rows(places: Sequence[int], num_rows: int) -> str:
    if len(places) == num_rows:
        return f"missing from all {num_rows} rows"
    named = ", ".join(map(str, places[:_NUM_NAMED_ROWS]))
    return f"missing from {len(places)} of {num_rows} rows: {named}" + (
        " ..." if len(places) > _NUM_NAMED_ROWS else ""
    )
