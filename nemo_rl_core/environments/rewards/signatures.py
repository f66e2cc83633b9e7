"""What a reward function takes: read off the names of its parameters.

| parameters | called |
|---|---|
| `prompt`, `completion` (or `response`), and columns of the row | for each completion |
| `prompts`, `completions` (or `responses`), and columns, as in TRL | once, with lists |
| `data_source`, `solution_str`, `ground_truth`, `extra_info`, as in verl | for each completion |
| two others, such as `p` and `r` | with prompt and completion, in this order |

A column is `answer`, `task`, `id`, `metadata` (a dict), or a key of `metadata`.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nemo_rl_core.environments.rewards.parameters import (
    BY_POSITION,
    COMPLETION,
    PROMPT,
    Parameter,
    parameters_of,
    takes,
)
from nemo_rl_core.environments.rewards.row_fields import (
    TEXTS,
    Fields,
    lacks_column,
    messages_of,
    verl_fields,
)
from nemo_rl_core.errors import ConfigError

Style = Literal["single", "batch"]
_PLURALS: Final = {"prompts", "completions", "responses"}


@dataclass(frozen=True, slots=True)
class RewardSignature:
    """How a reward function is called.

    Attributes:
        style: For each completion, or once with lists; None where only a call can tell.
        parameters: What it takes, in order.
        takes_columns: Whether it also takes all columns that it does not name (`**columns`).
        has_turns: Whether a conversation is passed as a list of messages, as TRL does.
        is_verl: Whether `ground_truth` and the like are verl's.
    """

    style: Style | None
    parameters: tuple[Parameter, ...]
    takes_columns: bool = False
    has_turns: bool = False
    is_verl: bool = False

    @classmethod
    def of(cls, fn: Callable[..., Any], name: str) -> "RewardSignature":
        """The signature of a function.

        Raises:
            ConfigError: If it does not take a completion.
        """
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some built-ins have none; the first call shows it
            return cls(None, BY_POSITION)
        given = list(signature.parameters.values())
        named = [each for each in given if each.kind not in _VARIADIC]
        if not named and any(each.kind is each.VAR_POSITIONAL for each in given):
            return cls(None, BY_POSITION)
        parameters = parameters_of(named)
        if not any(takes(each, "completion") for each in parameters):
            raise _without_completion(name, signature)
        names = {each.name for each in named}
        is_verl = "solution_str" in names
        # Two texts or two lists: only these may be either, as only these have no other sign. Of the
        # names of the documentation `completion` is one: a text.
        is_pair = len(parameters) == len(BY_POSITION) and all(
            takes(each, "prompt") or takes(each, "completion") for each in parameters
        )
        is_pair = is_pair and "completion" not in names
        style = _annotated_style(fn) or ("batch" if names & _PLURALS else None)
        return cls(
            style or (None if is_pair and not is_verl else "single"),
            parameters,
            takes_columns=any(each.kind is each.VAR_KEYWORD for each in given),
            has_turns=style == "batch" and "completions" in names,
            is_verl=is_verl,
        )

    @property
    def needed_columns(self) -> set[str]:
        """The columns that a row may lack and without which the function cannot be called."""
        needed = {each.field for each in self.parameters if each.is_required and not each.otherwise}
        return needed - {*TEXTS, "task", "id", "metadata"}

    def missing(self, fields: Fields) -> list[str]:
        """The required parameters for which a row has nothing."""
        fields = self._seen(fields)
        return [
            each.name
            for each in self.parameters
            if each.is_required and each.field not in fields and each.otherwise not in fields
        ]

    def arguments(self, rows: Sequence[Fields], style: Style) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one call: of a row, or in the style `batch` of several.

        Raises:
            RewardError: If a required parameter has nothing to take.
        """
        rows = [self._seen(fields) for fields in rows]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in self.parameters:
            found = [_value(each, fields) for fields in rows]
            if all(value is _ABSENT for value in found):
                if each.is_required:
                    raise lacks_column(each.name, rows[0])
                continue
            values = [None if value is _ABSENT else value for value in found]
            value = values if style == "batch" else values[0]
            if each.by_position:
                args.append(value)
            else:
                kwargs[each.name] = value
        if self.takes_columns:
            kwargs |= self._others(rows, style)
        return args, kwargs

    def _others(self, rows: Sequence[Fields], style: Style) -> dict[str, Any]:
        """What `**columns` takes: every column that no parameter names."""
        taken = {each.name for each in self.parameters}
        taken |= {each.field for each in self.parameters}.union(TEXTS[:3])
        names = dict.fromkeys(name for fields in rows for name in fields if name not in taken)
        columns = {name: [fields.get(name) for fields in rows] for name in names}
        if style == "batch":
            return columns
        return {name: values[0] for name, values in columns.items()}

    def _seen(self, fields: Fields) -> Fields:
        """The fields as this kind of function names and writes them."""
        if self.is_verl:
            return {**fields, **verl_fields(fields)}
        turns = messages_of(fields["prompt"]) if self.has_turns else None
        if turns is None:
            return fields
        reply = [{"role": "assistant", "content": fields["completion"]}]
        return {**fields, "prompt": turns, "completion": reply}


_ABSENT: Final = object()
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _value(parameter: Parameter, fields: Fields) -> Any:
    if parameter.field in fields:
        return fields[parameter.field]
    return fields.get(parameter.otherwise, _ABSENT) if parameter.otherwise else _ABSENT


def _without_completion(name: str, signature: inspect.Signature) -> ConfigError:
    return ConfigError(
        f"the reward function {name!r} cannot be called with a prompt and a response",
        expected="a parameter completion (or response), or lists: completions (or responses); "
        "beside it prompt, answer, task, id, metadata or any column of the row. Or two positional "
        "parameters, for prompt and response",
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
    texts = [name for name in names if name in PROMPT | COMPLETION]
    hint = hints.get((texts or names or [""])[0])
    if hint is str:
        return "single"
    base = typing.get_origin(hint) or hint
    return "batch" if isinstance(base, type) and issubclass(base, Sequence) else None
