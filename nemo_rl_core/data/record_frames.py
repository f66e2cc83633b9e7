"""Schemas of the tables that stages write: token pairs, logprobs, rollouts, evaluations."""

import math
from typing import Any

import pandas as pd
import pandera.pandas as pa
from pandera.typing import Series

from nemo_rl_core.data.frame_checks import (
    check_each,
    is_finite_list,
    is_list,
    is_text_or_null,
    is_token_list,
    same_lengths,
)


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
        return check_each(column, is_token_list)

    @pa.check("chosen_loss_mask", "rejected_loss_mask")
    def _trained(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda mask: is_list(mask) and any(mask))

    @pa.dataframe_check
    @classmethod
    def _masks_fit(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        return same_lengths(frame, "chosen_token_ids", "chosen_loss_mask") & same_lengths(
            frame, "rejected_token_ids", "rejected_loss_mask"
        )


class ReferenceLogprobSchema(pa.DataFrameModel):
    """Logprobs of a pair under the reference policy: one per trained token, in nats."""

    id: Series[str]
    chosen: Series[Any]
    rejected: Series[Any]

    @pa.check("chosen", "rejected")
    def _logprobs(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda each: is_finite_list(each) and len(each) > 0)


class RolloutSchema(pa.DataFrameModel):
    """A completion with its score.

    `logprobs`, `generated` and `weight_versions` have one value per token. A rollout that
    could not be scored has an `error` and no reward.
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

    @pa.check("reward", "advantage")
    def _finite(cls, column: Series[float]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: not math.isinf(value))

    @pa.check("error")
    def _text_or_null(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, is_text_or_null)

    @pa.check("components")
    def _numbers_or_nan(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, lambda value: is_list(value) and not any(map(math.isinf, value)))

    @pa.check("turn_rewards", "logprobs")
    def _finite_list(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, is_finite_list)

    @pa.dataframe_check
    @classmethod
    def _one_a_token(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        fits = same_lengths(frame, "completion_ids", "logprobs")
        for name in ("generated", "weight_versions"):
            given = check_each(frame[name], lambda value: len(value) > 0)
            fits &= ~given | same_lengths(frame, "completion_ids", name)
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
