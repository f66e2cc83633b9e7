import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.single_turn import RewardFunction
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.rewards.functional_reward import (
    FunctionalRewardWrapper,
    load_function,
)
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout

PAIRS = (["1+1=", "2+2="], ["2", "four"])


def annotated_single(prompt: str, response: str) -> float:
    assert isinstance(prompt, str)
    return float(len(response))


def annotated_batch(prompts: list[str], responses: list[str]) -> list[float]:
    assert isinstance(prompts, list)
    return [float(len(response)) for response in responses]


class CallableObject:
    def __call__(self, prompt: str, response: str) -> float:
        assert isinstance(prompt, str)
        return float(len(response))


@pytest.mark.parametrize(
    "fn",
    [
        annotated_single,
        annotated_batch,
        CallableObject(),
        CallableObject().__call__,
        lambda prompt, response: len(response + ""),
        lambda prompts, responses: [len(r + "") for r in responses],
        lambda prompts, responses: torch.tensor([len(r + "") for r in responses]),
        lambda prompts, responses: (len(r) for r in responses if isinstance(prompts, list)),
    ],
)
def test_single_and_batch_functions_give_the_same_scores(fn: Any) -> None:
    # len("2") = 1 and len("four") = 4.
    assert FunctionalRewardWrapper(fn).rewards(*PAIRS) == [1.0, 4.0]


def test_the_style_is_tried_once_and_a_constant_is_single() -> None:
    calls: list[Any] = []

    def constant(prompt, response):
        calls.append(type(prompt))
        return 0.5

    reward = FunctionalRewardWrapper(constant)
    assert reward.rewards(*PAIRS) == [0.5, 0.5]
    assert reward.rewards(*PAIRS) == [0.5, 0.5]
    # One trial with a list, one with a text, then twice two calls.
    assert calls == [list, str, str, str, str, str]


def test_no_prompts_no_calls() -> None:
    assert FunctionalRewardWrapper(lambda p, r: 1 / 0).rewards([], []) == []


def test_a_function_that_always_raises_says_so() -> None:
    with pytest.raises(RewardError) as caught:
        FunctionalRewardWrapper(lambda p, r: 1 / 0, name="bad").rewards(*PAIRS)
    text = str(caught.value)
    assert "'bad'" in text
    assert "'1+1='" in text
    assert "ZeroDivisionError" in text
    assert len(text.splitlines()) < 10


def test_only_the_completion_that_fails_is_an_error(rollout: Callable[..., Rollout]) -> None:
    def reward(prompt: str, response: str) -> float:
        return float(response)

    outcomes = FunctionalRewardWrapper(reward).score([rollout("1"), rollout("one")])
    assert outcomes[0] == 1.0
    assert isinstance(outcomes[1], RewardError)
    assert "'one'" in str(outcomes[1])
    assert "ValueError" in str(outcomes[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_results_other_than_finite_numbers_are_refused(value: Any) -> None:
    def single(prompt: str, response: str) -> float:
        return value

    def batch(prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0, value]

    for fn, prompt in ((single, "'1+1='"), (batch, "'2+2='")):
        with pytest.raises(RewardError) as caught:
            FunctionalRewardWrapper(fn).rewards(*PAIRS)
        assert prompt in str(caught.value)


@pytest.mark.parametrize("result", [[1.0], [1.0, 2.0, 3.0], 1.0, "ab", {"a": 1, "b": 2}, None])
def test_a_batch_of_another_shape_is_refused(result: Any) -> None:
    def batch(prompts: list[str], responses: list[str]) -> list[float]:
        return result

    with pytest.raises(RewardError):
        FunctionalRewardWrapper(batch).rewards(*PAIRS)


@pytest.mark.parametrize("fn", [lambda: 1.0, lambda p: 1.0, lambda text, answer: 1.0])
def test_functions_of_other_arity_are_refused_at_once(fn: Any) -> None:
    with pytest.raises(ConfigError, match="prompt and a response"):
        FunctionalRewardWrapper(fn)


def test_long_and_unicode_texts_reach_the_function_unchanged() -> None:
    texts = ["\u00e9\U0001f600" * 500_000, "\ud800"]
    assert FunctionalRewardWrapper(annotated_single).rewards(["", ""], texts) == [1_000_000.0, 1.0]


def test_step_scores_the_last_exchange() -> None:
    seen: list[tuple[str, str]] = []

    def reward(prompt: str, response: str) -> float:
        seen.append((prompt, response))
        return float(len(response))

    environment = FunctionalRewardWrapper(reward)
    log = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "bcd"},
    ]
    result = environment.step([log, log[:2]], [{"k": 1}, None])
    assert seen == [("second", "bcd"), ("first", "a")]
    assert result.rewards.tolist() == [3.0, 1.0]
    assert result.terminateds.tolist() == [True, True]
    assert result.metadata == [{"k": 1}, None]
    assert result.next_stop_strings == [None, None]
    assert result.observations == []
    batch = {"rewards": result.rewards}
    # (3 + 1) / 2
    assert environment.global_post_process_and_metrics(batch) == (batch, {"mean_reward": 2.0})


def test_step_refuses_a_conversation_without_an_answer() -> None:
    with pytest.raises(RewardError, match="no assistant turn"):
        FunctionalRewardWrapper(annotated_single).step([[{"role": "user", "content": "?"}]], [])


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_function_is_loaded_from_the_current_directory(
    in_folder: Path, rollout: Callable[..., Rollout]
) -> None:
    (in_folder / "my_reward_a.py").write_text(
        "def score(prompt: str, response: str) -> float:\n    return len(prompt) + len(response)\n"
    )
    scorer = make_scorer(RewardFunction(target="my_reward_a:score"))
    # len("12+34=") + len("46") = 6 + 2
    assert scorer.score([rollout("46")]) == [8.0]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (None, "my_reward_b:score", "ModuleNotFoundError"),
        ("import nothing_of_this_name", "my_reward_c:score", "nothing_of_this_name"),
        ("def", "my_reward_d:score", "SyntaxError"),
        ("raise SystemExit(0)", "my_reward_e:score", "SystemExit"),
        ("def score(p, r): ...", "my_reward_f:scroe", "one of score"),
        ("score = 3", "my_reward_g:score", "no function"),
        ("def score(p): ...", "my_reward_h:score", "two positional"),
        (
            "class Env:\n    def step(self, logs, metadata): ...",
            "my_reward_i:Env",
            'kind: python, target: "my_reward_i:Env"',
        ),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(
    in_folder: Path, source: str | None, target: str, message: str
) -> None:
    if source is not None:
        (in_folder / f"{target.split(':', maxsplit=1)[0]}.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function(target)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10
