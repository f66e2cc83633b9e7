"""Mistakes in a config, each with its path, its file and line, and the fix."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import (
    BaseModel,
    ValidationError,
)

from nemo_rl_core.config.names import name_hint
from nemo_rl_core.config.patterns import MESSAGES
from nemo_rl_core.config.places import place_of
from nemo_rl_core.config.sections import (
    Path,
    UnknownKey,
    dotted,
)
from nemo_rl_core.errors import ConfigError

FIX = "change the named values"
CONTRADICTION = "contradiction"


class Mistake(NamedTuple):
    """One problem that pydantic found, at a path of the input.

    Attributes:
        location: File and line, and a colon; empty if unknown.
        type: Pydantic's name of the problem.
        error: ConfigError raised by a section's validator, if any.
    """

    path: Path
    location: str
    type: str
    text: str
    value: Any
    error: ConfigError | None = None

    @property
    def line(self) -> str:
        """The mistake as one line of a list."""
        if self.error is not None:
            return f"{self._prefix}{_in_one_line(self.error)}"
        got = f" (got {self.value!r:.60})" if self._has_plain_value else ""
        return f"{self.location}{dotted(self.path) or 'config'}: {self.text}{got}"

    @property
    def as_error(self) -> ConfigError:
        """The error if this is the only mistake."""
        if self.error is not None:
            _, *hints = self.error.args
            return type(self.error)(f"{self._prefix}{self.error.problem}", *hints)
        text = f"{self.location}{dotted(self.path) or 'config'}: {self.text}"
        got = f"{self.value!r:.120}" if self._has_plain_value else None
        return ConfigError(listed_mistakes([text]), got=got, fix=FIX)

    @property
    def _has_plain_value(self) -> bool:
        """Whether the value is short; a section is long, and its text names what is wrong in it."""
        return self.type != "missing" and not isinstance(self.value, Mapping | list | BaseModel)

    @property
    def _prefix(self) -> str:
        has_both = self.location and self.path
        return f"{self.location}{dotted(self.path)}: " if has_both else self.location


def _in_one_line(error: ConfigError) -> str:
    hints = (("expected", error.expected), ("got", error.got), ("fix", error.fix))
    return "; ".join([error.problem, *(f"{word}: {text}" for word, text in hints if text)])


def placed(values: Any, path: Path) -> str:
    """Returns the file and line of a value, and a colon; "" if unknown."""
    location = place_of(values, path)
    return f"{location}: " if location else ""


def follows(mistake: Mistake, unknown: Sequence[UnknownKey]) -> bool:
    """Whether a mistake exists only because an unknown key was left out.

    Either a key is missing because it is misspelled, or a section has a default instead of the key.
    """
    if mistake.type == "missing":
        return any(mistake.path == (*each.path[:-1], each.meant) for each in unknown)
    return any(each.path[: len(mistake.path)] == mistake.path for each in unknown)


def describe(error: ValidationError, values: Any) -> ConfigError:
    """Turns pydantic's report into this project's form."""
    mistakes = mistakes_of(error, values)
    if len(mistakes) > 1:
        return ConfigError(listed_mistakes([each.line for each in mistakes]), fix=FIX)
    return mistakes[0].as_error


def listed_mistakes(lines: Sequence[str]) -> str:
    """Joins several mistakes, one per line, into the problem of an error."""
    return "\n  ".join(["the configuration is not valid:", *lines])


def mistakes_of(error: ValidationError, values: Any) -> list[Mistake]:
    """Returns pydantic's mistakes, without those of union members that were not meant."""
    mistakes = []
    for item in error.errors(include_url=False):
        path = _path(item["loc"], values, item["type"])
        contradiction = item["ctx"]["error"] if item["type"] == CONTRADICTION else None
        location = placed(values, path)
        mistakes.append(
            Mistake(path, location, item["type"], _text(item), item.get("input"), contradiction)
        )
    # The other members of the union did not match either, but were not meant.
    refused = {each.path for each in mistakes if each.error is not None and each.path}
    return [each for each in mistakes if each.error is not None or each.path not in refused]


def _path(location: Path, values: Any, problem: str) -> Path:
    """Removes the tags and types of union members that pydantic adds to a location."""
    path: list[str | int] = []
    is_section_new = True
    for part in location:
        is_index = isinstance(part, int) and isinstance(values, list | tuple)
        is_key = isinstance(values, Mapping) and part in values
        # The tag of a judge with kind: model is also the name of one of its keys.
        is_tag = is_key and is_section_new and values.get("kind") == part
        if is_index or (is_key and not is_tag):
            path.append(part)
            values = values[part]
        is_section_new = not is_tag
    return (*path, location[-1]) if problem == "missing" else tuple(path)


def _text(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "union_tag_not_found":
        return "needs a kind, such as {kind: ...}"
    if problem["type"] == "union_tag_invalid":
        return _unknown_tag(**problem["ctx"])
    if problem["type"] == "string_pattern_mismatch":
        return MESSAGES.get(problem["ctx"]["pattern"], str(problem["msg"]))
    return str(problem["msg"]).removeprefix("Value error, ")


def _unknown_tag(discriminator: str, tag: str, expected_tags: str) -> str:
    choices = [each.strip().strip("'") for each in expected_tags.split(",")]
    name = discriminator.strip("'").removesuffix("()").removesuffix("_of")
    hint = name_hint(tag, choices) or f"it is one of {', '.join(choices)}"
    return f"there is no {name} {tag!r}; {hint}"
