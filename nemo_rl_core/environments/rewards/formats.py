"""Scores the format of completions with a regular expression or a JSON Schema."""

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from nemo_rl_core.config.single_turn import JsonSchemaMatch, RegexMatch
from nemo_rl_core.environments.interfaces import Scorer, attempt, error_context
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout

_FENCE = re.compile(r"^```[^\n`]*$", re.MULTILINE)


class _FormScorer(Scorer):
    _source: ClassVar[str]
    """Name of the scorer in error messages."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        return [
            attempt(partial(self._score, each.text), **error_context(each, self._source))
            for each in rollouts
        ]

    @abstractmethod
    def _score(self, completion: str) -> float: ...


class RegexScorer(_FormScorer):
    """Scores 1.0 if a regular expression matches, else 0.0; a match that times out is an error.

    It uses the `regex` library, which has timeouts: `re` would backtrack for years over `(a+)+b`.
    """

    _source = "the regular expression"

    def __init__(self, config: RegexMatch) -> None:
        import regex

        try:
            compiled = regex.compile(config.pattern)
        except regex.error as error:
            raise ConfigError(
                "environment.pattern is not a valid regular expression",
                expected="an expression of Python's regex library",
                got=f"{config.pattern!r}: {error}",
                fix="in YAML, put it between single quotes, which need no escapes for backslashes",
            ) from error
        self._match = compiled.fullmatch if config.match == "whole" else compiled.search
        self._timeout_seconds = config.match_timeout_seconds

    def _score(self, completion: str) -> float:
        # Without `concurrent` it would keep the interpreter's lock until the deadline.
        match = self._match(completion.strip(), concurrent=True, timeout=self._timeout_seconds)
        return float(match is not None)


class JsonSchemaScorer(_FormScorer):
    """Scores 1.0 if the completion is JSON that the schema accepts, else 0.0.

    `NaN`, `Infinity` and objects with duplicate keys are not valid JSON here, since parsers
    disagree about them.
    """

    _source = "the JSON schema"

    def __init__(self, config: JsonSchemaMatch) -> None:
        self._validator = _validator(config.json_schema)
        self._where = config.where

    def _score(self, completion: str) -> float:
        text = completion if self._where == "whole" else last_code_block(completion)
        try:
            value = _strict_json(text)
        except (ValueError, RecursionError):  # a thousand nested brackets
            return 0.0
        return float(self._validator.is_valid(value))


def last_code_block(text: str) -> str:
    """Returns the text between the last two lines of three backticks, or an empty text.

    Example:
        >>> last_code_block("So:\\n```json\\n{}\\n```\\nThat is all.")
        '{}'
    """
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return ""
    return text[fences[-2].end() : fences[-1].start()].strip()


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_without_duplicates)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _validator(text: str) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = _strict_json(text)
        validator = validator_for(schema)
        validator.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ConfigError(
            "environment.json_schema is not a valid JSON Schema",
            expected='JSON text such as {"type": "object", "required": ["answer"]}',
            got=str(error).splitlines()[0][:200],
            fix="in YAML, put the JSON between single quotes",
        ) from error
    # An empty registry, so that a $ref to an address is an error instead of a request.
    return validator(schema, registry=Registry())
