"""Parameters of a reward function, and the field of a rollout that each takes."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nemo_rl_core.environments.rewards.row_fields import (
    COLUMNS,
)

PROMPT: Final = {"prompt", "prompts"}
COMPLETION: Final = {"completion", "completions", "response", "responses", "solution_str"}
_ALIASES: Final = {
    "prompts": "prompt",
    "completions": "completion",
    "responses": "response",
    "solution_str": "completion",
}
_KNOWN: Final = (PROMPT | COMPLETION).union(COLUMNS)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a reward function.

    Attributes:
        name: Its name.
        field: The field that it takes.
        otherwise: The field that it takes where a row has no such field.
        is_required: Whether it has no default.
        by_position: Whether it is passed by its position.
    """

    name: str
    field: str
    otherwise: str | None
    is_required: bool
    by_position: bool


BY_POSITION: Final = (
    Parameter("prompt", "prompt", None, is_required=True, by_position=True),
    Parameter("response", "response", None, is_required=True, by_position=True),
)


def parameters_of(named: Sequence[inspect.Parameter]) -> tuple[Parameter, ...]:
    """Each parameter with the field that it takes.

    The first two are prompt and completion where no parameter is named after these; a column of
    such a name counts only where the other of the two is named.
    """
    names = {each.name for each in named}
    free = {0: "prompt", 1: "completion"}
    if names & PROMPT:
        del free[0]
    if names & COMPLETION:
        del free[1]
    positions = [place for place, each in enumerate(named) if each.kind is not each.KEYWORD_ONLY]
    taken = {place: free[place] for place in positions if place in free}
    taken = {place: field for place, field in taken.items() if named[place].name not in _KNOWN}
    if "completion" not in taken.values() and not names & COMPLETION:
        taken = {}
    both = len(taken) == len(BY_POSITION)
    return tuple(
        Parameter(
            each.name,
            taken[place] if both and place in taken else _ALIASES.get(each.name, each.name),
            taken.get(place),
            is_required=each.default is each.empty or (both and place in taken),
            by_position=each.kind is each.POSITIONAL_ONLY,
        )
        for place, each in enumerate(named)
    )


def takes(parameter: Parameter, field: str) -> bool:
    """Whether a parameter takes the prompt or the completion."""
    names = PROMPT if field == "prompt" else COMPLETION
    return parameter.field in names or parameter.otherwise == field
