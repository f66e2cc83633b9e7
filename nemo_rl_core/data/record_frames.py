"""Checks of columns, and schemas of token pairs, logprobs, rollouts and evaluations."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pandas as pd
import pandera.pandas as pa
from pandera.typing import Series

from nemo_rl_core.data.json_values import parsed


def is_json_object(text: Any) -> bool:
    """Whether a value is the text of a JSON object."""
    if isinstance(text, str) and text == "{}":
        return True
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def has_text(column: "Series[str]") -> "pd.Series[bool]":
    """Returns whether each value of a column is not blank."""
    # Values that are not text pass: the check of the column's type reports them.
    return check_each(column, lambda value: not isinstance(value, str) or bool(value.strip()))


def check_each(column: Any, is_valid: Callable[[Any], bool]) -> "pd.Series[bool]":
    """Applies a check to each value, for columns of lists, which have no pandas type."""
    values = column.tolist()  # iterating over the column would create each string again
    return pd.Series([bool(is_valid(value)) for value in values], index=column.index, dtype=bool)


def _is_text_or_null(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, str) or value is None or is_nan


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _is_finite_list(value: Any) -> bool:
    return _is_list(value) and all(math.isfinite(item) for item in value)


def _is_token_list(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(item >= 0 for item in value)


def _same_lengths(frame: pd.DataFrame, one: str, other: str) -> "pd.Series[bool]":
    fits = [
        _is_list(a) and _is_list(b) and len(a) == len(b)
        for a, b in zip(frame[one], frame[other], strict=True)
    ]
    return pd.Series(fits, index=frame.index, dtype=bool)


class TokenPairSchema(pa.DataFrameModel):
    """A preference pair as token ids with loss masks."""

    id: Series[str]
    chosen_token_ids: Series[Any]
    chosen_loss_mask: Series[Any]
    rejected_token_ids: Series[Any]
    rejected_loss_mask: Series[Any]
    margin: Series[float] = pa.Field(ge=0, lt=float("inf"))

    @pa.check("chosen_token_ids", "rejected_token_ids")
    def _tokens(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, _is_token_list)

    @pa.check("chosen_loss_mask", "rejected_loss_mask")
    def _trained(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda mask: _is_list(mask) and any(mask))

    @pa.dataframe_check
    @classmethod
    def _masks_fit(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        return _same_lengths(frame, "chosen_token_ids", "chosen_loss_mask") & _same_lengths(
            frame, "rejected_token_ids", "rejected_loss_mask"
        )


class ReferenceLogprobSchema(pa.DataFrameModel):
    """Logprobs of a pair under the reference policy: one per trained token, in nats."""

    id: Series[str]
    chosen: Series[Any]
    rejected: Series[Any]

    @pa.check("chosen", "rejected")
    def _logprobs(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: _is_finite_list(value) and len(value) > 0)


class RolloutSchema(pa.DataFrameModel):
    """A completion with its score.

    `logprobs`, `generated` and `weight_versions` have one value per token. A rollout that
    could not be scored has an `error` and no reward. `messages` is the JSON of the turns, or, in
    files of earlier versions, a list of roles and contents.
    """

    prompt_id: Series[str]
    group: Series[int] = pa.Field(ge=0)
    sample: Series[int] = pa.Field(ge=0)
    task: Series[str]
    prompt: Series[str]
    completion: Series[str]
    answer: Series[str]
    reward: Series[float] = pa.Field(nullable=True, coerce=True)
    advantage: Series[float] = pa.Field(nullable=True, coerce=True)
    truncated: Series[bool]
    error: Series[Any] = pa.Field(nullable=True)
    turn_rewards: Series[Any]
    components: Series[Any]
    messages: Series[Any]
    metadata: Series[str]
    prompt_ids: Series[Any]
    completion_ids: Series[Any]
    logprobs: Series[Any]
    generated: Series[Any]
    weight_versions: Series[Any]
    num_unread_tokens: Series[int] = pa.Field(ge=0)
    part: Series[int] = pa.Field(ge=0)

    @pa.check("reward", "advantage")
    def _finite(cls, column: Series[float]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: not math.isinf(value))

    @pa.check("error")
    def _text_or_null(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, _is_text_or_null)

    @pa.check("messages")
    def _turns(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: _is_list(parsed(value, list)))

    @pa.check("components")
    def _numbers_or_nan(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: _is_list(value) and not any(map(math.isinf, value)))

    @pa.check("turn_rewards", "logprobs")
    def _finite_list(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, _is_finite_list)

    @pa.dataframe_check
    @classmethod
    def _one_per_token(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        fits = _same_lengths(frame, "completion_ids", "logprobs")
        for name in ("generated", "weight_versions"):
            is_present = check_each(frame[name], lambda value: len(value) > 0)
            fits &= ~is_present | _same_lengths(frame, "completion_ids", name)
        return fits


class EvalSchema(pa.DataFrameModel):
    """A completion of an evaluation with its score."""

    prompt_id: Series[str]
    mode: Series[str] = pa.Field(isin=("greedy", "sampled"))
    sample: Series[int] = pa.Field(ge=0)
    category: Series[str]
    prompt: Series[str]
    completion: Series[str]
    answer: Series[str]
    extracted: Series[Any] = pa.Field(nullable=True)
    reward: Series[float] = pa.Field(nullable=True, coerce=True)
    correct: Series[Any] = pa.Field(nullable=True)
    truncated: Series[bool]
    error: Series[Any] = pa.Field(nullable=True)
    grader_version: Series[int] | None = pa.Field(ge=1)

    @pa.check("correct")
    def _verdict(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: value is None or value in (True, False))

    @pa.dataframe_check
    @classmethod
    def _once(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        return ~frame.duplicated(["prompt_id", "mode", "sample"])


class PairEvalSchema(pa.DataFrameModel):
    """A preference pair with the scores of a reward model."""

    id: Series[str]
    chosen: Series[str]
    rejected: Series[str]
    chosen_score: Series[float] = pa.Field(gt=-float("inf"), lt=float("inf"))
    rejected_score: Series[float] = pa.Field(gt=-float("inf"), lt=float("inf"))
