"""Reward functions in the styles of this project, of TRL and of verl."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.interfaces import score_rollouts
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.errors import ConfigError, NotApplicableError, RewardError
from nemo_rl_core.types import Rollout

Make = Callable[..., Rollout]
ROW = {"metadata": json.dumps({"difficulty": 2, "tags": ["a", "b"]})}


def outcomes(fn: Any, *rollouts: Rollout) -> list[Any]:
    return FunctionalRewardWrapper(fn).score(rollouts)


def test_a_function_gets_the_columns_that_it_names(rollout: Make) -> None:
    def reward(prompt, completion, answer, metadata):
        assert (prompt, answer) == ("12+34=", "46")
        return float(completion == answer) + metadata["difficulty"]

    assert outcomes(reward, rollout("46", **ROW), rollout("47", **ROW)) == [3.0, 2.0]


def test_a_prompt_and_a_completion_are_texts_from_the_first_call(rollout: Make) -> None:
    """No trial with lists comes first, and a failure on the first row does not end the run."""
    seen = []

    def reward(prompt, completion):
        seen.append(completion)
        return float(int(completion))

    failed, scored = outcomes(reward, rollout("none"), rollout("46"))
    assert isinstance(failed, RewardError)
    assert (scored, seen) == (46.0, ["none", "46"])


@pytest.mark.parametrize(
    ("fn", "value"),
    [
        (lambda completion, answer: float(completion == answer), 1.0),
        (lambda answer, response: float(response == answer), 1.0),
        (lambda completion, *, difficulty: difficulty, 2.0),
        (lambda p, r, answer: float((p, r, answer) == ("12+34=", "46", "46")), 1.0),
        (lambda question, completion, answer: float(question == "12+34="), 1.0),
        (lambda completion, id, task: float((id, task) == ("0", "arithmetic")), 1.0),
        (lambda completion, **columns: len(columns["tags"]) + columns["difficulty"], 4.0),
        (lambda completion, completion_ids, answer: float(completion_ids == []), 1.0),
        (lambda completion: 2.0 * bool(completion), 2.0),
        (lambda completions, tags: [len(each) for each in tags], 2.0),
    ],
)
def test_columns_are_passed_by_name_in_any_order(rollout: Make, fn: Any, value: float) -> None:
    assert outcomes(fn, rollout("46", **ROW)) == [value]


def test_a_column_overrides_a_default(rollout: Make) -> None:
    def reward(prompt, completion, answer=None, difficulty=7, unknown=0.5):
        return difficulty + unknown if completion == answer else 0.0

    assert outcomes(reward, rollout("46", **ROW)) == [2.5]
    assert outcomes(reward, rollout("46")) == [7.5]
    assert outcomes(reward, rollout("46", answer="")) == [0.0]


def test_a_missing_column_is_named_with_the_existing_ones(rollout: Make) -> None:
    def reward(completion: str, solution: str) -> float:
        return float(completion == solution)

    scorer = FunctionalRewardWrapper(reward)
    (failed,) = scorer.score([rollout("46", **ROW)])
    assert isinstance(failed, RewardError)
    assert "no column 'solution'" in str(failed)
    assert "answer, task, id, metadata, difficulty, tags" in failed.expected
    assert scorer.missing_columns(rollout("46", **ROW).prompt) == ["solution"]
    has = rollout("46", metadata='{"solution": "46"}')
    assert scorer.missing_columns(has.prompt) == []
    assert scorer.score([has]) == [1.0]


def test_a_function_without_a_completion_is_refused() -> None:
    for fn in (lambda answer, metadata: 1.0, lambda text, answer: 1.0, lambda **columns: 1.0):
        with pytest.raises(ConfigError) as caught:
            FunctionalRewardWrapper(fn)
        assert "answer, task, id, metadata" in str(caught.value)


def test_trl_functions_run_as_they_are(rollout: Make) -> None:
    """The functions are from TRL's documentation; columns of the data are lists."""
    calls = []

    def reward_len(completions, **kwargs):
        return [float(len(set(completion))) for completion in completions]

    def reward_func(prompts, completions, answer, **kwargs):
        calls.append((prompts, completions, answer, sorted(kwargs)))
        matches = [c == a for c, a in zip(completions, answer, strict=True)]
        return [1.0 if match else 0.0 for match in matches]

    rows = [rollout("46", **ROW), rollout("47")]
    assert outcomes(reward_len, *rows) == [2.0, 2.0]
    assert outcomes(reward_func, *rows) == [1.0, 0.0]
    ((prompts, completions, answers, names),) = calls
    assert prompts == ["12+34=", "12+34="]
    assert (completions, answers) == (["46", "47"], ["46", "46"])
    assert names == ["completion_ids", "difficulty", "id", "messages", "metadata", "tags", "task"]


def test_trl_gets_a_conversation_as_messages(rollout: Make) -> None:
    def format_reward_func(completions, prompts, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        assert prompts[0][-1]["content"] == "12+34="
        return [float(each.startswith("<think>")) for each in contents]

    prompt = json.dumps([{"role": "user", "content": "12+34="}])
    assert outcomes(format_reward_func, rollout("<think>", prompt=prompt)) == [1.0]


def test_verl_functions_run_as_they_are(rollout: Make) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "openai/gsm8k"
        assert extra_info["index"] == 3
        return {"score": float(solution_str == ground_truth), "acc": True}

    row = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}}
    assert outcomes(compute_score, rollout("46", metadata=json.dumps(row))) == [1.0]
    # A ground truth that is not a text keeps its type; without verl's columns, ours are used.
    row["reward_model"] = {"style": "rule", "ground_truth": [46, 47]}

    def listed(data_source, solution_str, ground_truth, extra_info):
        return float(int(solution_str) in ground_truth)

    assert outcomes(listed, rollout("47", metadata=json.dumps(row))) == [1.0]

    def plain(data_source, solution_str, ground_truth, extra_info):
        return float((data_source, ground_truth, extra_info) == ("sums", "46", {"k": 1}))

    assert outcomes(plain, rollout("46", task="sums", metadata='{"k": 1}')) == [1.0]
    calls = []

    def two(data_source, solution_str):
        calls.append((data_source, solution_str))
        return 1.0

    assert outcomes(two, rollout("46", task="sums")) == [1.0]
    assert calls == [("sums", "46")]


def test_coroutines_are_awaited_concurrently(rollout: Make) -> None:
    running = []

    async def judge(completion: str, answer: str) -> float:
        running.append(completion)
        while len(running) < 3:  # every call waits for all others
            await asyncio.sleep(0.001)
        if completion == "bad":
            raise LookupError("cannot read it")
        return float(completion == answer)

    async def batch(completions, **columns):
        await asyncio.sleep(0)
        return [0.25] * len(completions)

    async def verl(data_source, solution_str, ground_truth, extra_info):
        return {"score": 0.5}

    scorer = FunctionalRewardWrapper(judge)
    first, failed, last = scorer.score([rollout(text) for text in ("46", "bad", "47")])
    assert (first, last) == (1.0, 0.0)
    assert "LookupError: cannot read it" in failed.got
    assert scorer.score([rollout("46")]) == [1.0]  # the same loop again
    scorer.close()
    assert outcomes(batch, rollout("a"), rollout("b")) == [0.25, 0.25]
    assert outcomes(verl, rollout("a")) == [0.5]


def test_an_error_shows_the_line_of_user_code(rollout: Make) -> None:
    def reward(completion: str, answer: str) -> float:
        return 1.0 / (float(answer) - float(completion))

    (failed,) = outcomes(reward, rollout("46"))
    assert "ZeroDivisionError" in failed.got
    assert "test_signatures.py:" in failed.got
    assert "return 1.0 / (float(answer) - float(completion))" in failed.got


def near(completion, answer):
    return 1.0 / (1 + abs(int(answer) - int(completion)))


def short(completions, **columns):
    return [-float(len(each)) for each in completions]


def test_several_functions_with_weights_and_their_means(rollout: Make) -> None:
    scorer = as_scorer([near, short], [1.0, 0.1])
    rows = score_rollouts(scorer, [rollout("46"), rollout("45")])
    # 1 - 0.1 * 2 and 1/2 - 0.1 * 2
    assert [row.reward for row in rows] == pytest.approx([0.8, 0.3])
    assert [row.components for row in rows] == [(1.0, -2.0), (0.5, -2.0)]
    assert means(scorer, rows) == {"near": 0.75, "short": -2.0}
    assert as_scorer([near, short]).score([rollout("46")]) == [-1.0]
    unnamed = as_scorer([near, near, lambda completion: 0.0])
    rows = score_rollouts(unnamed, [rollout("46")])
    assert means(unnamed, rows) == {"near": 1.0, "near_2": 1.0, "reward_3": 0.0}


def test_none_leaves_a_function_out_of_a_row(rollout: Make) -> None:
    """The same as in TRL, where a reward for code does not apply to a row of mathematics."""

    def code_only(completions, task, **columns):
        return [1.0 if each == "code" else None for each in task]

    scorer = as_scorer([near, code_only], [1.0, 2.0])
    rows = score_rollouts(scorer, [rollout("46"), rollout("46", task="code")])
    assert [row.reward for row in rows] == [1.0, 3.0]
    assert means(scorer, rows) == {"near": 1.0, "code_only": 1.0}
    # If no function applies, the reward is missing, which is not a reward of 0.
    (single,) = outcomes(code_only, rollout("46"))
    (both,) = as_scorer([code_only, code_only]).score([rollout("46")])
    assert isinstance(single, NotApplicableError)
    assert isinstance(both, NotApplicableError)


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        ([near, short], [1.0], "2 reward_weights"),
        ([near], [float("nan")], "1 reward_weights"),
        ([], None, "at least one reward"),
        (near, [1.0], "a list of functions"),
        (None, [1.0], "a list of functions"),
    ],
)
def test_weights_that_do_not_fit_are_refused(reward: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_scorer(reward, weights)
    assert message in str(caught.value)


def means(scorer: Any, rows: list[Rollout]) -> dict[str, float]:
    import torch

    batch = {"reward_components": torch.tensor([row.components for row in rows])}
    _, metrics = scorer.global_post_process_and_metrics(batch)
    return metrics
