import json

import pytest
from pydantic import ValidationError

from nemo_rl_core.config.environment import (
    ByTask,
    grader_version,
    is_multi_turn,
    single_environments,
)
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.by_task import ByTaskEnvironment
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.multi_turn.replies import split
from nemo_rl_core.errors import RewardError

SINGLE = [
    {"task": "sums", "environment": {"kind": "exact"}},
    {"task": "form", "environment": {"kind": "regex", "pattern": "[a-z]+"}},
    {
        "task": "both",
        "environment": {"kind": "weighted_sum", "parts": [{"environment": {"kind": "exact"}}]},
    },
]
GAME = {"task": "guess_number", "environment": {"kind": "guess_number"}}


def by_task(*tasks):
    return ByTask.model_validate({"tasks": tasks})


def test_each_row_is_scored_by_the_environment_of_its_task(rollout):
    scorer = make_scorer(by_task(*SINGLE))
    rows = [
        rollout("abc", task="form"),
        rollout("46", task="sums"),
        rollout("46", task="form"),
        rollout("abc", task="sums"),
        rollout("46", task="both"),
    ]
    assert scorer.score(rows) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scorer.score([]) == []


def test_an_unknown_task_is_an_error_of_its_rows(rollout):
    outcomes = make_scorer(by_task(*SINGLE)).score(
        [rollout("46", task="sums"), rollout("46", task="poems")]
    )
    assert outcomes[0] == 1.0
    assert isinstance(outcomes[1], RewardError)
    assert "'poems'" in str(outcomes[1])
    assert "both, form, sums" in str(outcomes[1])


def test_a_task_named_twice_is_refused():
    with pytest.raises(ValidationError, match="repeats a task"):
        by_task(SINGLE[0], SINGLE[0])


def test_the_config_lists_its_environments():
    assert [each.kind for each in single_environments(by_task(*SINGLE, GAME))] == [
        "exact",
        "regex",
        "exact",
    ]
    assert not is_multi_turn(by_task(*SINGLE))
    assert is_multi_turn(by_task(*SINGLE, GAME))


def test_each_task_has_the_version_of_its_grader():
    both = {"kind": "weighted_sum", "parts": [{"environment": {"kind": "math"}}]}
    tools = {"kind": "tools", "answer": {"kind": "multiple_choice"}}
    tasks = [("both", both), ("tools", tools), ("exact", {"kind": "exact"})]
    config = by_task(*({"task": name, "environment": each} for name, each in tasks), GAME)
    assert [grader_version(config, name) for name, _ in tasks] == [2, 2, 1]
    assert grader_version(config, "guess_number") == grader_version(config, "unknown") == 1


def conversation(text, task, **metadata):
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return log, {"answer": "46", "task": task, **metadata}


def test_games_and_single_turns_run_in_one_batch():
    scorer = make_scorer(by_task(*SINGLE, GAME))
    assert isinstance(scorer, EnvironmentScorer)
    game = {"game": {"secret": 3, "low": 0, "high": 9}, "max_turns": 4}
    rows = [
        conversation("5", "guess_number", **game),
        conversation("46", "sums"),
        conversation("3", "guess_number", **game),
        conversation("46", "poems"),
        conversation("47", "sums"),
    ]
    environment = scorer.environment
    replies = split(environment.step(*zip(*rows, strict=True)), 5)
    assert [reply.reward for reply in replies] == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert [reply.terminated for reply in replies] == [False, True, True, True, True]
    assert replies[0].observation == "0-4="
    assert replies[0].metadata["task"] == "guess_number"
    assert "no environment scores the task 'poems'" in replies[3].error
    assert [reply.error for index, reply in enumerate(replies) if index != 3] == [None] * 4


def test_an_environment_that_raises_fails_only_its_task():
    class Raises:
        def step(self, logs, metadata):
            if any(log[-1]["content"] == "bad" for log in logs):
                raise LookupError("no such row")
            return make_scorer(by_task(GAME)).environment.step(logs, metadata)

    game = {"game": {"secret": 3, "low": 0, "high": 9}, "max_turns": 4}
    environment = ByTaskEnvironment(
        {"odd": Raises(), "guess_number": make_scorer(by_task(GAME)).environment}
    )
    rows = [conversation("bad", "odd"), conversation("3", "guess_number", **game)]
    replies = split(environment.step(*zip(*rows, strict=True)), 2)
    assert "LookupError: no such row" in replies[0].error
    assert (replies[1].reward, replies[1].error) == (1.0, None)


def test_first_stop_strings_are_those_of_all_tasks():
    class Tools:
        first_stop_strings = ("</call>", "</end>")

    class Other:
        first_stop_strings = ("</end>",)

    environment = ByTaskEnvironment({"a": Tools(), "b": Other(), "c": object()})
    assert environment.first_stop_strings == ["</call>", "</end>"]


def test_the_single_turn_view_scores_a_game_of_one_turn(rollout):
    scorer = make_scorer(by_task(*SINGLE, GAME))
    about = json.dumps({"game": {"secret": 3, "low": 0, "high": 9}, "max_turns": 1})
    rows = [rollout("3", task="guess_number", metadata=about), rollout("46", task="sums")]
    assert scorer.score(rows) == [1.0, 1.0]
