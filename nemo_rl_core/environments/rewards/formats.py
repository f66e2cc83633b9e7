"""Completions that must have a form, whatever they say: a regular expression, or a JSON Schema."""

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from nemo_rl_core.config.single_turn import JsonSchemaMatch, RegexMatch
from nemo_rl_core.environments.interfaces import Scorer, attempt
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout

_FENCE = re.compile(r"^```[^\n`]*$", re.MULTILINE)


class _FormScorer(Scorer):
    """A scorer for which the completion's text alone decides."""

    _source: ClassVar[str]
    """Who scores, in messages."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""
        return [
            attempt(
                partial(self._score, rollout.text),
                prompt=rollout.prompt.text,
                completion=rollout.text,
                source=self._source,
            )
            for rollout in rollouts
        ]

    @abstractmethod
    def _score(self, completion: str) -> float: ...


class RegexScorer(_FormScorer):
    """1.0 when a regular expression matches, else 0.0; one that runs out of time has no score.

    Of the `regex` library, which can stop: `re` would backtrack for years over `(a+)+b`.

    Args:
        config: The expression, and for how long it may look.

    Raises:
        ConfigError: If the expression is none.
    """

    _source = "the regular expression"

    def __init__(self, config: RegexMatch) -> None:
        import regex

        try:
            compiled = regex.compile(config.pattern)
        except regex.error as error:
            raise ConfigError(
                "environment.pattern is no regular expression",
                expected="an expression of Python's regex library",
                got=f"{config.pattern!r}: {error}",
                fix="in YAML, put it between single quotes, in which a backslash is itself",
            ) from error
        self._match = compiled.fullmatch if config.match == "whole" else compiled.search
        self._timeout_seconds = config.match_timeout_seconds

    def _score(self, completion: str) -> float:
        # Without `concurrent` it would hold the interpreter's lock, up to the deadline.
        found = self._match(completion.strip(), concurrent=True, timeout=self._timeout_seconds)
        return float(found is not None)


class JsonSchemaScorer(_FormScorer):
    """1.0 when the completion is JSON that the schema accepts, else 0.0.

    `NaN`, `Infinity` and objects that name a key twice are no JSON here: what reads the completion
    later may take them otherwise than what checked it.

    Args:
        config: The schema, and where in the completion the JSON stands.

    Raises:
        ConfigError: If the schema is none, or refers to another document.
    """

    _source = "the JSON schema"

    def __init__(self, config: JsonSchemaMatch) -> None:
        self._validator = _validator(config.json_schema)
        self._where = config.where

    def _score(self, completion: str) -> float:
        text = completion if self._where == "whole" else last_code_block(completion)
        try:
            value = _strict_json(text)
        except (ValueError, RecursionError):  # brackets within brackets, a thousand deep
            return 0.0
        return float(self._validator.is_valid(value))


def last_code_block(text: str) -> str:
    """What stands between the last two lines of three backticks; empty where there are none.

    Example:
        >>> last_code_block("So:\\n```json\\n{}\\n```\\nThat is all.")
        '{}'
    """
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return ""
    return text[fences[-2].end() : fences[-1].start()].strip()


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_without_repetition)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


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
            "environment.json_schema is no JSON Schema",
            expected='JSON text such as {"type": "object", "required": ["answer"]}',
            got=str(error).splitlines()[0][:200],
            fix="in YAML, put the JSON between single quotes",
        ) from error
    # An empty registry: a $ref to an address is an error of the row's, and no request.
    return validator(schema, registry=Registry())
