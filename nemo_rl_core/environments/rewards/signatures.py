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
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout

Style = Literal["single", "batch"]
Fields = Mapping[str, Any]
"""What a completion can be scored by, by name."""

_PROMPT: Final = {"prompt", "prompts"}
_COMPLETION: Final = {"completion", "completions", "response", "responses", "solution_str"}
_PLURALS: Final = {"prompts", "completions", "responses"}
_ALIASES: Final = {
    "prompts": "prompt",
    "completions": "completion",
    "responses": "response",
    "solution_str": "completion",
}
_COLUMNS: Final = ("answer", "task", "id", "metadata")
_KNOWN: Final = (_PROMPT | _COMPLETION).union(_COLUMNS)
_TEXTS: Final = ("prompt", "completion", "response", "completion_ids")
"""Fields that are no columns; a row's own columns of these names are in its `metadata` alone."""


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
            return cls(None, _BY_POSITION)
        given = list(signature.parameters.values())
        named = [each for each in given if each.kind not in _VARIADIC]
        if not named and any(each.kind is each.VAR_POSITIONAL for each in given):
            return cls(None, _BY_POSITION)
        parameters = _parameters(named)
        if not any(_takes(each, "completion") for each in parameters):
            raise _without_completion(name, signature)
        names = {each.name for each in named}
        is_verl = "solution_str" in names
        # Two texts or two lists: only these may be either, as only these have no other sign.
        is_pair = len(parameters) == len(_BY_POSITION) and all(
            _takes(each, "prompt") or _takes(each, "completion") for each in parameters
        )
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
        return needed - {*_TEXTS, "task", "id", "metadata"}

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
        taken |= {each.field for each in self.parameters}.union(_TEXTS[:3])
        names = dict.fromkeys(name for fields in rows for name in fields if name not in taken)
        columns = {name: [fields.get(name) for fields in rows] for name in names}
        if style == "batch":
            return columns
        return {name: values[0] for name, values in columns.items()}

    def _seen(self, fields: Fields) -> Fields:
        """The fields as this kind of function names and writes them."""
        if self.is_verl:
            return {**fields, **_verl_fields(fields)}
        turns = _turns(fields["prompt"]) if self.has_turns else None
        if turns is None:
            return fields
        reply = [{"role": "assistant", "content": fields["completion"]}]
        return {**fields, "prompt": turns, "completion": reply}


_ABSENT: Final = object()
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_POSITION: Final = (
    Parameter("prompt", "prompt", None, is_required=True, by_position=True),
    Parameter("response", "response", None, is_required=True, by_position=True),
)


def fields_of(rollout: Rollout) -> dict[str, Any]:
    """What a completion can be scored by; without `answer`, where the row has none."""
    prompt = rollout.prompt
    fields = given_fields(prompt.text, rollout.text, json.loads(prompt.metadata))
    fields |= {"task": prompt.task, "completion_ids": list(rollout.completion.token_ids)}
    # Without an answer, or in an episode without an id, the column is not there.
    fields |= {"id": prompt.id} if prompt.id else {}
    return fields | ({"answer": prompt.answer} if prompt.answer else {})


def given_fields(prompt: str, completion: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a text and its completion, where there is no more of a row than that."""
    texts = {"prompt": prompt, "completion": completion, "response": completion}
    return {**metadata, **texts, "metadata": dict(metadata)}


def column_names(fields: Fields) -> list[str]:
    """The names that a reward function may take of this row."""
    return [name for name in dict.fromkeys([*_TEXTS, *_COLUMNS, *fields]) if name in fields]


def lacks_column(name: str, fields: Fields) -> RewardError:
    """The error of a row that has nothing for a required parameter."""
    return RewardError(
        f"the row has no column {name!r}, which a parameter is named after",
        expected=f"one of {', '.join(column_names(fields))}",
        got=name,
        fix="name one of these, give the parameter a default, or add the column to the data",
    )


def _parameters(named: Sequence[inspect.Parameter]) -> tuple[Parameter, ...]:
    """Each parameter with the field that it takes.

    The first two are prompt and completion where no parameter is named after these; a column of
    such a name counts only where the other of the two is named.
    """
    names = {each.name for each in named}
    free = {0: "prompt", 1: "completion"}
    if names & _PROMPT:
        del free[0]
    if names & _COMPLETION:
        del free[1]
    positions = [place for place, each in enumerate(named) if each.kind is not each.KEYWORD_ONLY]
    taken = {place: free[place] for place in positions if place in free}
    taken = {place: field for place, field in taken.items() if named[place].name not in _KNOWN}
    if "completion" not in taken.values() and not names & _COMPLETION:
        taken = {}
    both = len(taken) == len(_BY_POSITION)
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


def _takes(parameter: Parameter, field: str) -> bool:
    names = _PROMPT if field == "prompt" else _COMPLETION
    return parameter.field in names or parameter.otherwise == field


def _value(parameter: Parameter, fields: Fields) -> Any:
    if parameter.field in fields:
        return fields[parameter.field]
    return fields.get(parameter.otherwise, _ABSENT) if parameter.otherwise else _ABSENT


def _verl_fields(fields: Fields) -> dict[str, Any]:
    """verl's names: a row's own values of these names, else this project's columns."""
    model = fields.get("reward_model")
    model = model if isinstance(model, Mapping) else {}
    found = {
        "data_source": fields.get("data_source", fields.get("task")),
        "ground_truth": model.get("ground_truth", fields.get("answer")),
        "extra_info": fields.get("extra_info", fields.get("metadata")),
    }
    if "ground_truth" in fields:
        found["ground_truth"] = fields["ground_truth"]
    return {name: value for name, value in found.items() if value is not None}


def _turns(text: str) -> list[dict[str, Any]] | None:
    """The messages of a prompt that is a conversation, which arrives as JSON."""
    if not text.startswith("["):
        return None
    try:
        turns = json.loads(text)
    except ValueError:
        return None
    is_conversation = turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if is_conversation else None


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
    texts = [name for name in names if name in _PROMPT | _COMPLETION]
    hint = hints.get((texts or names or [""])[0])
    if hint is str:
        return "single"
    base = typing.get_origin(hint) or hint
    return "batch" if isinstance(base, type) and issubclass(base, Sequence) else None
