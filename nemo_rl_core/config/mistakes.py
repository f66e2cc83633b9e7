"""Mistakes in a config, each with its path, its place in the file and the fix."""

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
        path: From the top of the input.
        place: The file and line of it, and a colon; empty where it is not known.
        type: Pydantic's name of the problem.
        text: What is wrong.
        value: The input at the path.
        error: A contradiction that a section refused.
    """

    path: Path
    place: str
    type: str
    text: str
    value: Any
    error: ConfigError | None = None

    @property
    def line(self) -> str:
        """The mistake as one of several."""
        if self.error is not None:
            return f"{self._where}{_in_one_line(self.error)}"
        plain = not isinstance(self.value, Mapping | list | BaseModel)
        got = f" (got {self.value!r:.60})" if plain and self.type != "missing" else ""
        return f"{self.place}{dotted(self.path) or 'config'}: {self.text}{got}"

    @property
    def alone(self) -> ConfigError:
        """The error of the only mistake."""
        if self.error is not None:
            _, *hints = self.error.args
            return type(self.error)(f"{self._where}{self.error.problem}", *hints)
        text = f"{self.place}{dotted(self.path) or 'config'}: {self.text}"
        return ConfigError(listed_mistakes([text]), got=repr(self.value)[:120], fix=FIX)

    @property
    def _where(self) -> str:
        return f"{self.place}{dotted(self.path)}: " if self.place and self.path else self.place


def _in_one_line(error: ConfigError) -> str:
    hints = (("expected", error.expected), ("got", error.got), ("fix", error.fix))
    return "; ".join([error.problem, *(f"{word}: {text}" for word, text in hints if text)])


def placed(values: Any, path: Path) -> str:
    """The file and line of a value, and a colon; empty where they are not known."""
    place = place_of(values, path)
    return f"{place}: " if place else ""


def follows(mistake: Mistake, unknown: Sequence[UnknownKey]) -> bool:
    """Whether a mistake is there only because an unknown key was left out.

    Either a key is missing because it is misspelt, or a section is not what it would be with the
    key: it has a default in its place.
    """
    if mistake.type == "missing":
        return any(mistake.path == (*each.path[:-1], each.meant) for each in unknown)
    return any(each.path[: len(mistake.path)] == mistake.path for each in unknown)


def describe(error: ValidationError, values: Any) -> ConfigError:
    """Turns pydantic's report into this project's form.

    Args:
        error: Of the validation of `values`.
        values: The input, from which the paths of the problems are read.
    """
    mistakes = mistakes_of(error, values)
    if len(mistakes) > 1:
        return ConfigError(listed_mistakes([each.line for each in mistakes]), fix=FIX)
    return mistakes[0].alone


def listed_mistakes(lines: Sequence[str]) -> str:
    """The problem of an error for several mistakes, one a line."""
    return "\n  ".join(["the configuration is not valid:", *lines])


def mistakes_of(error: ValidationError, values: Any) -> list[Mistake]:
    """The mistakes that pydantic found, without those of members of a union that were not meant."""
    found = []
    for item in error.errors(include_url=False):
        path = _path(item["loc"], values, item["type"])
        contradiction = item["ctx"]["error"] if item["type"] == CONTRADICTION else None
        place = placed(values, path)
        found.append(
            Mistake(path, place, item["type"], _text(item), item.get("input"), contradiction)
        )
    # The other members of a union did not fit either, but were not meant.
    refused = {each.path for each in found if each.error is not None and each.path}
    return [each for each in found if each.error is not None or each.path not in refused]


def _path(location: Path, values: Any, problem: str) -> Path:
    """A location without what pydantic adds to it: the tags and types of unions' members."""
    path: list[str | int] = []
    is_section_new = True
    for part in location:
        is_place = isinstance(part, int) and isinstance(values, list | tuple)
        is_key = isinstance(values, Mapping) and part in values
        # The tag of a judge with kind: model is also the name of one of its keys.
        is_tag = is_key and is_section_new and values.get("kind") == part
        if is_place or (is_key and not is_tag):
            path.append(part)
            values = values[part]
        is_section_new = not is_tag
    return (*path, location[-1]) if problem == "missing" else tuple(path)


def _text(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "union_tag_not_found":
        return "must say of which kind it is, as in {kind: ...}"
    if problem["type"] == "union_tag_invalid":
        return _unknown_tag(**problem["ctx"])
    if problem["type"] == "string_pattern_mismatch":
        return MESSAGES.get(problem["ctx"]["pattern"], str(problem["msg"]))
    return str(problem["msg"]).removeprefix("Value error, ")


def _unknown_tag(discriminator: str, tag: str, expected_tags: str) -> str:
    choices = [each.strip().strip("'") for each in expected_tags.split(",")]
    name = discriminator.strip("'").removesuffix("()").removesuffix("_of")
    hint = name_hint(tag, choices, {}) or f"it is one of {', '.join(choices)}"
    return f"there is no {name} {tag!r}; {hint}"
