"""Signatures of reward functions, inferred from the names of their parameters.

| parameters | called |
|---|---|
| `prompt`, `completion` (or `response`), and columns of the row | for each completion |
| `prompts`, `completions` (or `responses`), and columns, as in TRL | once, with lists |
| `data_source`, `solution_str`, `ground_truth`, `extra_info`, as in verl | for each completion |
| two other names, such as `p` and `r` | with prompt and completion, in this order |

A column is `answer`, `task`, `id`, `metadata` (a dict), or a key of `metadata`.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nemo_rl_core.environments.rewards.row_fields import (
    COLUMNS,
    TEXTS,
    Fields,
    lacks_column,
    messages_of,
    verl_fields,
)
from nemo_rl_core.errors import ConfigError

Style = Literal["single", "batch"]
_PLURALS: Final = {"prompts", "completions", "responses"}
_PROMPT: Final = {"prompt", "prompts"}
_COMPLETION: Final = {"completion", "completions", "response", "responses", "solution_str"}
_ALIASES: Final = {
    "prompts": "prompt",
    "completions": "completion",
    "responses": "response",
    "solution_str": "completion",
}
_KNOWN: Final = (_PROMPT | _COMPLETION).union(COLUMNS)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a reward function, filled by the field `field`, else by `otherwise`."""

    name: str
    field: str
    otherwise: str | None
    is_required: bool
    by_position: bool


_BY_POSITION: Final = (
    Parameter("prompt", "prompt", None, is_required=True, by_position=True),
    Parameter("response", "response", None, is_required=True, by_position=True),
)


@dataclass(frozen=True, slots=True)
class RewardSignature:
    """Calling convention of a reward function.

    Attributes:
        style: `single` for one call per completion, `batch` for one call with lists; None if only a
            trial call can decide.
        takes_columns: Whether all other columns are passed too (`**columns`).
        has_turns: Whether a conversation is passed as a list of messages, as in TRL.
        is_verl: Whether the parameters have verl's names, such as `ground_truth`.
    """

    style: Style | None
    parameters: tuple[Parameter, ...]
    takes_columns: bool = False
    has_turns: bool = False
    is_verl: bool = False

    @classmethod
    def of(cls, fn: Callable[..., Any], name: str) -> "RewardSignature":
        """Returns the signature of a function."""
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some built-ins have no signature
            return cls(None, _BY_POSITION)
        declared = list(signature.parameters.values())
        named = [each for each in declared if each.kind not in _VARIADIC]
        if not named and any(each.kind is each.VAR_POSITIONAL for each in declared):
            return cls(None, _BY_POSITION)
        parameters = _parameters_of(named)
        if not any(_takes(each, "completion") for each in parameters):
            raise _without_completion(name, signature)
        names = {each.name for each in named}
        is_verl = "solution_str" in names
        # A pair without annotations may take two texts or two lists. The documented name
        # `completion` means a text.
        is_pair = len(parameters) == len(_BY_POSITION) and all(
            _takes(each, "prompt") or _takes(each, "completion") for each in parameters
        )
        is_pair = is_pair and "completion" not in names
        style = _annotated_style(fn) or ("batch" if names & _PLURALS else None)
        return cls(
            style or (None if is_pair and not is_verl else "single"),
            parameters,
            takes_columns=any(each.kind is each.VAR_KEYWORD for each in declared),
            has_turns=style == "batch" and "completions" in names,
            is_verl=is_verl,
        )

    @property
    def needed_columns(self) -> set[str]:
        """Columns that the function requires and that a row may lack."""
        needed = {each.field for each in self.parameters if each.is_required and not each.otherwise}
        return needed - {*TEXTS, "task", "id", "metadata"}

    def missing(self, fields: Fields) -> list[str]:
        """Returns the required parameters that a row has no field for."""
        fields = self._converted(fields)
        return [
            each.name
            for each in self.parameters
            if each.is_required and each.field not in fields and each.otherwise not in fields
        ]

    def arguments(self, rows: Sequence[Fields], style: Style) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of one call: for one row, or for several in the style `batch`."""
        rows = [self._converted(fields) for fields in rows]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in self.parameters:
            values = [_value(each, fields) for fields in rows]
            if all(value is _ABSENT for value in values):
                if each.is_required:
                    raise lacks_column(each.name, rows[0])
                continue
            values = [None if value is _ABSENT else value for value in values]
            value = values if style == "batch" else values[0]
            if each.by_position:
                args.append(value)
            else:
                kwargs[each.name] = value
        if self.takes_columns:
            kwargs |= self._others(rows, style)
        return args, kwargs

    def _others(self, rows: Sequence[Fields], style: Style) -> dict[str, Any]:
        taken = {each.name for each in self.parameters}
        taken |= {each.field for each in self.parameters}.union(TEXTS[:3])
        names = dict.fromkeys(name for fields in rows for name in fields if name not in taken)
        columns = {name: [fields.get(name) for fields in rows] for name in names}
        if style == "batch":
            return columns
        return {name: values[0] for name, values in columns.items()}

    def _converted(self, fields: Fields) -> Fields:
        if self.is_verl:
            return {**fields, **verl_fields(fields)}
        turns = messages_of(fields["prompt"]) if self.has_turns else None
        if turns is None:
            return fields
        reply = [{"role": "assistant", "content": fields["completion"]}]
        return {**fields, "prompt": turns, "completion": reply}


_ABSENT: Final = object()
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters_of(named: Sequence[inspect.Parameter]) -> tuple[Parameter, ...]:
    """Uses the first two parameters for prompt and completion, unless others have these names.

    If neither name exists, a column with the name of one of the first two does not fill it.
    """
    names = {each.name for each in named}
    free = {0: "prompt", 1: "completion"}
    if names & _PROMPT:
        del free[0]
    if names & _COMPLETION:
        del free[1]
    positional = [index for index, each in enumerate(named) if each.kind is not each.KEYWORD_ONLY]
    taken = {index: free[index] for index in positional if index in free}
    taken = {index: field for index, field in taken.items() if named[index].name not in _KNOWN}
    if "completion" not in taken.values() and not names & _COMPLETION:
        taken = {}
    both = len(taken) == len(_BY_POSITION)
    return tuple(
        Parameter(
            each.name,
            taken[index] if both and index in taken else _ALIASES.get(each.name, each.name),
            taken.get(index),
            is_required=each.default is each.empty or (both and index in taken),
            by_position=each.kind is each.POSITIONAL_ONLY,
        )
        for index, each in enumerate(named)
    )


def _takes(parameter: Parameter, field: str) -> bool:
    names = _PROMPT if field == "prompt" else _COMPLETION
    return parameter.field in names or parameter.otherwise == field


def _value(parameter: Parameter, fields: Fields) -> Any:
    if parameter.field in fields:
        return fields[parameter.field]
    return fields.get(parameter.otherwise, _ABSENT) if parameter.otherwise else _ABSENT


def _without_completion(name: str, signature: inspect.Signature) -> ConfigError:
    return ConfigError(
        f"the reward function {name!r} cannot be called with a prompt and a response",
        expected="a parameter completion (or response), or for lists completions (or responses); "
        "in addition prompt, answer, task, id, metadata or any column of the row. Or two "
        "positional parameters, for prompt and response",
        got=f"{name.rpartition(':')[2]}{signature}",
        fix="add a parameter named completion",
    )


def _annotated_style(fn: Callable[..., Any]) -> Style | None:
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    try:
        hints = typing.get_type_hints(target)
        names = list(inspect.signature(fn).parameters)
    except (NameError, TypeError, ValueError, AttributeError):
        return None
    # Columns of a row may be lists; texts never are.
    texts = [name for name in names if name in _PROMPT | _COMPLETION]
    hint = hints.get((texts or names or [""])[0])
    if hint is str:
        return "single"
    base = typing.get_origin(hint) or hint
    return "batch" if isinstance(base, type) and issubclass(base, Sequence) else None
