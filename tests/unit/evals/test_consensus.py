"""Which answer a completion gives, and what several agree on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.single_turn import ExactMatch, MathVerify, ReasoningGymScore
from nemo_rl_core.evals.consensus import consensus_at_k, extractor, majority, math_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1} no, \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"never closed: \boxed{3", "3"),
        ("3 apples and 4 pears\n#### 1,234", "1234"),
        ("The answer is $x^2+1$.", "1"),  # the last number of the line; a box is exact
        ("The answer is: blue.", "blue"),
        ("first 3, then -4.50", "-4.50"),
        ("no idea", "noidea"),
        ("", ""),
    ],
)
def test_math_answers(completion: str, answer: str) -> None:
    assert math_answer(completion) == answer


def test_each_environment_reads_its_own_kind_of_answer() -> None:
    text = "so <answer> 7 </answer>, or 8 "
    assert extractor(ExactMatch())(text) == text.strip()
    assert extractor(ReasoningGymScore())(text) == "7"
    assert extractor(MathVerify())(text) == "8"


def test_ties_go_to_the_answer_that_came_first() -> None:
    assert majority(["b", "a", "a", "b"]) == 0
    assert majority(["c", "b", "a", "a", "b"]) == 1
    assert majority(["x"]) == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_the_winner_is_as_frequent_as_any_and_is_where_it_first_came(answers: list[str]) -> None:
    place = majority(answers)
    assert place == answers.index(answers[place])
    assert all(answers.count(answers[place]) >= answers.count(each) for each in answers)


def test_consensus_by_hand() -> None:
    answers, correct = ["5", "4", "4", "5", "5"], [False, True, True, False, False]
    # One: 5. Two: a tie, and 5 came first. Three: 4. Four: a tie. Five: 5.
    expected = [False, False, True, False, False]
    assert [consensus_at_k(answers, correct, k) for k in range(1, 6)] == expected
