"""Votes of completions, and their majority."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    TaskEnvironment,
    WeightedPart,
    WeightedSum,
)
from nemo_rl_core.config.single_turn import (
    ExactMatch,
    MathVerify,
    MultipleChoice,
    ReasoningGymScore,
)
from nemo_rl_core.evals.consensus import consensus_at_k, majority, voting
from nemo_rl_core.types import Completion, Prompt, Rollout


def _votes(environment: EnvironmentConfig, *texts: str, task: str = "") -> list[str]:
    prompt = Prompt("1", "?", (1,), "4", task)
    completion = Completion((1,), (0.0,), truncated=False)
    with voting(environment) as get_votes:
        return get_votes([Rollout(prompt, completion, text) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "votes"),
    [
        (
            ["The answer is 3/2.", "The answer is 1/2.", r"\boxed{\frac{1}{2}}"],
            ["3/2", "1/2", "1/2"],
        ),
        (
            ["The answer is (1, 2)", "It is 5", "The answer is (3, 2)"],
            ["(1, 2)", "It is 5", "(3, 2)"],
        ),
        (["0.5", "<think>7</think>1/2", "1,200", r"$1200$"], ["0.5", "0.5", "1,200", "1,200"]),
        (["12:30", "11:30", "The answer is 12:30."], ["12:30", "11:30", "12:30"]),
        (["", "no idea", "no idea", "<think>4"], ["", "no idea", "no idea", ""]),
    ],
)
def test_equal_mathematics_votes_for_one_answer(texts: list[str], votes: list[str]) -> None:
    assert _votes(MathVerify(), *texts) == votes


def test_each_environment_extracts_its_kind_of_answer() -> None:
    text = "so <answer> 7 </answer>, or (B) "
    choice, gym = MultipleChoice(), ReasoningGymScore()
    assert _votes(ExactMatch(), text) == [text.strip()]
    assert _votes(gym, text) == ["7"]
    assert _votes(choice, text) == ["B"]
    parts = [WeightedPart(environment=each) for each in (ExactMatch(), choice)]
    assert _votes(WeightedSum(parts=parts), text) == ["B"]
    assert _votes(WeightedSum(parts=parts[:1]), text) == [text.strip()]
    tasks = ByTask(
        tasks=[
            TaskEnvironment(task="gym", environment=gym),
            TaskEnvironment(task="choice", environment=choice),
        ]
    )
    by_task = {task: _votes(tasks, text, task=task) for task in ("gym", "choice", "other")}
    assert by_task == {"gym": ["7"], "choice": ["B"], "other": [text.strip()]}


def test_ties_go_to_the_answer_that_came_first() -> None:
    assert majority(["b", "a", "a", "b"]) == 0
    assert majority(["c", "b", "a", "a", "b"]) == 1
    assert majority(["x"]) == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_the_winner_is_the_first_of_the_most_frequent_answers(answers: list[str]) -> None:
    index = majority(answers)
    assert index == answers.index(answers[index])
    assert all(answers.count(answers[index]) >= answers.count(each) for each in answers)


def test_consensus_by_hand() -> None:
    answers, correct = ["5", "4", "4", "5", "5"], [False, True, True, False, False]
    # One: 5. Two: a tie, and 5 came first. Three: 4. Four: a tie. Five: 5.
    expected = [False, False, True, False, False]
    assert [consensus_at_k(answers, correct, k) for k in range(1, 6)] == expected
