"""Invalid rows of every table are refused when it is written and when it is read."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nemo_rl_core.data.frames import PreferenceSchema, PromptSchema, SftSchema, check_frame
from nemo_rl_core.data.loader import load_frame, save_frame
from nemo_rl_core.data.record_frames import (
    EvalSchema,
    PairEvalSchema,
    ReferenceLogprobSchema,
    RolloutSchema,
    TokenPairSchema,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.rows import load_eval_rows
from nemo_rl_core.rollouts.records import load_rollouts

ROW = {"id": "a", "task": "sums", "metadata": "{}"}
PROMPT = ROW | {"prompt": "1+1=", "answer": "2", "completion": "2"}
PREFERENCE = ROW | {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5}
TOKENS = {
    "id": "a",
    "chosen_token_ids": [1, 2],
    "chosen_loss_mask": [False, True],
    "rejected_token_ids": [1, 3, 4],
    "rejected_loss_mask": [False, True, True],
    "margin": 0.0,
}
LOGPROBS = {"id": "a", "chosen": [-0.5], "rejected": [-0.1, -2.0]}
ROLLOUT = {
    "prompt_id": "a",
    "group": 0,
    "sample": 0,
    "task": "sums",
    "prompt": "1+1=",
    "completion": "2",
    "answer": "2",
    "reward": 1.0,
    "advantage": None,
    "truncated": False,
    "error": None,
    "turn_rewards": [],
    "components": [],
    "messages": [],
    "metadata": "{}",
    "prompt_ids": [1, 2],
    "completion_ids": [6, 2],
    "logprobs": [-0.5, -0.1],
    "generated": [],
    "weight_versions": [],
    "num_unread_tokens": 0,
    "part": 0,
}
EVALUATION = {
    "prompt_id": "a",
    "mode": "greedy",
    "sample": 0,
    "category": "sums",
    "prompt": "1+1=",
    "completion": "2",
    "answer": "2",
    "extracted": None,
    "reward": None,
    "correct": None,
    "truncated": False,
    "error": "no answer",
}
SCORED = {
    "id": "a",
    "chosen": "2",
    "rejected": "3",
    "chosen_score": 1.0,
    "rejected_score": -1.0,
}


@pytest.mark.parametrize(
    ("schema", "good", "change", "fragment"),
    [
        (PromptSchema, PROMPT, {"answer": " "}, "answer is empty"),
        (PromptSchema, PROMPT, {"metadata": "[]"}, "metadata is not a JSON object"),
        (SftSchema, PROMPT, {"completion": ""}, "completion is empty"),
        (PreferenceSchema, PREFERENCE, {"rejected": ""}, "rejected is empty"),
        (PreferenceSchema, PREFERENCE, {"margin": -1.0}, "margin greater_than_or_equal_to(0)"),
        (TokenPairSchema, TOKENS, {"chosen_token_ids": []}, "chosen_token_ids is not a list of"),
        (TokenPairSchema, TOKENS, {"chosen_loss_mask": [True]}, "a loss mask is not as long as"),
        (TokenPairSchema, TOKENS, {"rejected_loss_mask": [False] * 3}, "has no trained token"),
        (ReferenceLogprobSchema, LOGPROBS, {"chosen": [float("nan")]}, "chosen is not a list of"),
        (ReferenceLogprobSchema, LOGPROBS, {"rejected": []}, "rejected is not a list of finite"),
        (RolloutSchema, ROLLOUT, {"reward": float("inf")}, "reward is not finite"),
        (RolloutSchema, ROLLOUT, {"logprobs": [-0.5]}, "logprobs, generated or weight_versions"),
        (RolloutSchema, ROLLOUT, {"generated": [True]}, "logprobs, generated or weight_versions"),
        (RolloutSchema, ROLLOUT, {"error": 3}, "error is neither text nor null"),
        (RolloutSchema, ROLLOUT, {"sample": -1}, "sample greater_than_or_equal_to(0)"),
        (EvalSchema, EVALUATION, {"mode": "beam"}, "mode isin"),
        (EvalSchema, EVALUATION, {"correct": "yes"}, "correct is neither true, false nor null"),
        (EvalSchema, EVALUATION, {"prompt_id": "row 0"}, "one sample of a mode twice"),
        (PairEvalSchema, SCORED, {"chosen_score": float("inf")}, "chosen_score less_than(inf)"),
    ],
)
def test_a_bad_row_is_named(
    schema: Any, good: dict[str, Any], change: dict[str, Any], fragment: str
) -> None:
    key = "prompt_id" if "prompt_id" in good else "id"
    rows = [good | {key: f"row {index}"} for index in range(3)]
    check_frame(schema, pd.DataFrame(rows), name="good")
    rows[2] |= change
    with pytest.raises(DataError) as caught:
        check_frame(schema, pd.DataFrame(rows), name="spoilt")
    error = str(caught.value)
    assert error.startswith("the spoilt data set fails ")
    (line,) = [line for line in error.splitlines() if fragment in line]
    assert line.endswith(": rows 2"), line


@pytest.mark.parametrize("good", [PROMPT, PREFERENCE, TOKENS, LOGPROBS])
def test_a_data_set_folder_is_checked_when_written_and_when_read(
    good: dict[str, Any], tmp_path: Path
) -> None:
    save_frame(pd.DataFrame([good]), tmp_path / "good")
    assert load_frame(tmp_path / "good")["id"].tolist() == ["a"]
    name = {"prompt", "chosen_token_ids", "chosen"} & good.keys()
    spoilt = pd.DataFrame([good]).drop(columns=max(name))
    if "chosen_token_ids" in good:
        spoilt = pd.DataFrame([good | {"chosen_token_ids": []}])
    with pytest.raises(DataError, match=r"fails a check|fails \d checks"):
        save_frame(spoilt, tmp_path / "bad")
    spoilt.to_parquet(tmp_path / "good" / "rows.parquet")
    with pytest.raises(DataError, match=r"fails a check|fails \d checks"):
        load_frame(tmp_path / "good")


def test_rollouts_and_evaluations_are_checked_when_read(tmp_path: Path) -> None:
    pd.DataFrame([ROLLOUT | {"logprobs": [-0.5]}]).to_parquet(tmp_path / "step_000001.parquet")
    with pytest.raises(DataError, match="rollouts step_000001 data set fails"):
        load_rollouts(tmp_path / "step_000001.parquet")
    pd.DataFrame([EVALUATION | {"mode": "beam"}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="mode isin"):
        load_eval_rows(tmp_path / "rows.parquet")
