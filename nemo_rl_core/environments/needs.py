"""Checks before anything is sampled: the objects that a config names, and the columns it needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    WeightedSum,
    environments_of_task,
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
from nemo_rl_core.environments.agent_programs import check_agent
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.rewards.functional_reward import (
    FunctionalRewardWrapper,
    load_function,
)
from nemo_rl_core.environments.rewards.math import MathScorer
from nemo_rl_core.environments.rewards.multiple_choice import MultipleChoiceScorer
from nemo_rl_core.environments.rewards.row_fields import field_names, fields_of
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.environments.targets import find_environment
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.types import Prompt, unscored

MissingColumns = Callable[[Prompt], Sequence[str]]
"""Returns the columns that scoring needs and that the row of a prompt lacks.

Raises RewardError for a row that cannot be scored for another reason.
"""

_NUM_NAMED_ROWS = 5
_NUM_LISTED_ROWS = 100


def missing_columns(config: EnvironmentConfig) -> MissingColumns:
    """Returns the column check of an environment, without making or starting the environment."""
    match config:
        case ToolUse(answer=answer) | AgentEnvironment(reward=answer) if answer is not None:
            return missing_columns(answer)
        case RewardFunction(target=target):
            return FunctionalRewardWrapper.from_target(target).missing_columns
        case MultipleChoice(num_choices=num_choices):
            return MultipleChoiceScorer(num_choices=num_choices).missing_columns
        case WeightedSum(parts=parts):
            needs = [missing_columns(part.environment) for part in parts]
            return lambda prompt: list(
                dict.fromkeys(name for need in needs for name in need(prompt))
            )
        case ByTask(tasks=tasks):
            by_task = {each.task: missing_columns(each.environment) for each in tasks}
            return lambda prompt: by_task.get(prompt.task, no_columns)(prompt)
    return _NEEDS.get(type(config), no_columns)


def check_targets(config: EnvironmentConfig | None) -> None:
    """Imports the functions and environments that a config names, without calling them.

    Does nothing for None, an environment that this process cannot import.
    """
    if config is None:
        return
    for single in single_environments(config):
        if isinstance(single, RewardFunction):
            load_function(single.target)
    for environment in multi_turn_environments(config):
        if isinstance(environment, PythonEnvironment):
            find_environment(environment)
        if isinstance(environment, ToolUse):
            schemas_of(environment.tools)
        if isinstance(environment, AgentEnvironment):
            check_agent(environment)


def refuse_incomplete_rows(
    prompts: Iterable[Prompt], scored_by: Scorer | EnvironmentConfig | None, *, name: str
) -> None:
    """Refuses rows of the data set `name`, such as `train`, that cannot be scored.

    Refuses none with None, an environment that this process cannot import.
    """
    if scored_by is None:
        return
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
    golds: dict[str, list[int]] = {}
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
        if prompt.answer and _is_compared_as_math(scored_by, prompt.task):
            golds.setdefault(prompt.answer, []).append(index)
    wrong |= _incomparable(golds)
    if wrong:
        raise _wrong_rows(wrong, num_rows, name)
    if first is None:
        return
    columns = " and the column ".join(lacking)
    fix = "add the column to the data, or choose a reward that does not need it"
    if list(lacking) != ["answer"]:
        fix += "; or rename the parameter to an existing column, or give it a default"
    raise DataError(
        f"the {name} data set lacks the column {columns}, which {scorer} needs",
        expected=f"the column {columns} in every row",
        got="; ".join(f"{column}: {_rows(rows, num_rows)}" for column, rows in lacking.items())
        + f". Existing columns: {', '.join(field_names(fields_of(unscored(first))))}",
        fix=fix,
    )


def _is_compared_as_math(scored_by: Scorer | EnvironmentConfig, task: str) -> bool:
    if isinstance(scored_by, Scorer):  # its own `missing_columns` checks them
        return False
    return any(isinstance(each, MathVerify) for each in environments_of_task(scored_by, task))


def _incomparable(golds: Mapping[str, Sequence[int]]) -> dict[int, RewardError]:
    scorer = MathScorer()
    try:
        faults = scorer.faults(golds)
    finally:
        scorer.close()
    return {
        row: RewardError(
            "their reference answers cannot be compared",
            expected="a number, a formula, a set, a time, a ratio or some words",
            got=why,
            fix="correct the answers or remove the rows, or choose another environment",
        )
        for answer, why in faults.items()
        for row in golds[answer]
    }


def _wrong_rows(wrong: dict[int, RewardError], num_rows: int, name: str) -> DataError:
    first, *_ = wrong.values()
    rows = sorted(wrong)
    reasons = [f"row {index}: {wrong[index].got}" for index in rows[:_NUM_NAMED_ROWS]]
    if others := [str(index) for index in rows[_NUM_NAMED_ROWS:][:_NUM_LISTED_ROWS]]:
        reasons.append(f"also row {', '.join(others)}")
    more = ["..."] if len(rows) > _NUM_NAMED_ROWS + _NUM_LISTED_ROWS else []
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
    CodeTests: _unit_tests,
}


def no_columns(_: Prompt) -> Sequence[str]:
    """Column check of an environment that reads only texts, or checks its rows itself."""
    return ()


def _rows(indices: Sequence[int], num_rows: int) -> str:
    if len(indices) == num_rows:
        return f"missing from all {num_rows} rows"
    named = ", ".join(map(str, indices[:_NUM_NAMED_ROWS]))
    return f"missing from {len(indices)} of {num_rows} rows: {named}" + (
        " ..." if len(indices) > _NUM_NAMED_ROWS else ""
    )
