"""Against the real child process; one is shared, since each start imports sympy."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nemo_rl_core.config.environment import MathVerify
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.math import MathScorer
from nemo_rl_core.environments.math_worker import equal
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Make = Callable[..., Rollout]


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    made = make_scorer(MathVerify(timeout_seconds=3))
    assert isinstance(made, MathScorer)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("46", "The answer is 46.", 1.0),
        ("46", "12 + 34 = 46", 1.0),
        ("46", r"so \boxed{46}", 1.0),
        ("46", "45", 0.0),
        ("46", "", 0.0),
        ("1/2", r"$\frac{2}{4}$", 1.0),
        ("0.5", "1/2", 1.0),
        ("-3", "-3", 1.0),
        ("-3", "3", 0.0),
        ("1,000", "1000", 1.0),
        ("$x^2+1$", "$1+x^2$", 1.0),
        (r"\boxed{7}", "7", 1.0),
    ],
)
def test_equal_mathematics_scores_one(
    scorer: MathScorer, rollout: Make, answer: str, completion: str, score: float
) -> None:
    assert scorer.score([rollout(completion, answer=answer)]) == [score]


@pytest.mark.parametrize(
    "completion",
    ["{}}}{\\frac{", "\u2211 \U0001f600 \x00 \ud800", "\\boxed{", "$" * 999, "(" * 5000, "\n" * 99],
)
def test_garbage_scores_zero(scorer: MathScorer, rollout: Make, completion: str) -> None:
    assert scorer.score([rollout(completion)]) == [0.0]


def test_a_megabyte_is_answered_or_refused_within_the_deadline(
    scorer: MathScorer, rollout: Make
) -> None:
    started = time.monotonic()
    outcomes = scorer.outcomes([rollout("word " * 200_000 + "46"), rollout("1" * 1_000_000)])
    # Two deadlines of 3 s, each with its second of grace, and at most two starts of the child.
    assert time.monotonic() - started < 2 * 4 + 30
    # A score is only given where the whole text could be read.
    assert all(outcome in (0.0, 1.0) or isinstance(outcome, RewardError) for outcome in outcomes)
    assert scorer.score([rollout("46")]) == [1.0]


def test_a_time_out_is_an_error_and_not_a_zero(rollout: Make) -> None:
    scorer = MathScorer(timeout_seconds=0.5)
    try:
        bomb = rollout("$9^{9^{9^{9}}}$")
        outcomes = scorer.outcomes([rollout("46"), bomb, rollout("45")])
        assert outcomes[0] == 1.0
        assert isinstance(outcomes[1], RewardError)
        assert "TimeoutError" in str(outcomes[1])
        assert "'12+34='" in str(outcomes[1])
        assert outcomes[2] == 0.0
        with pytest.raises(RewardError, match="TimeoutError"):
            scorer.score([bomb])
    finally:
        scorer.close()


@pytest.mark.parametrize("answer", ["", "?", "\u65e5\u672c"])
def test_a_reference_without_mathematics_is_an_error(
    scorer: MathScorer, rollout: Make, answer: str
) -> None:
    with pytest.raises(RewardError, match="math-verify raised") as caught:
        scorer.score([rollout(answer, answer=answer)])
    assert "no mathematics in the reference answer" in str(caught.value)


def test_a_dead_child_is_replaced(rollout: Make) -> None:
    scorer = MathScorer()
    try:
        assert scorer.score([rollout("46")]) == [1.0]
        assert scorer._worker is not None
        scorer._worker._process.kill()
        scorer._worker._process.wait()
        (outcome,) = scorer.outcomes([rollout("46")])
        assert isinstance(outcome, RewardError)
        assert scorer.score([rollout("46")]) == [1.0]
    finally:
        scorer.close()


def test_it_works_from_a_thread_where_signals_do_not(scorer: MathScorer, rollout: Make) -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(scorer.score([rollout("46")])))
    thread.start()
    thread.join(timeout=60)
    assert found == [1.0]


def test_close_ends_the_child_and_may_be_called_twice(rollout: Make) -> None:
    scorer = MathScorer()
    scorer.score([rollout("46")])
    assert scorer._worker is not None
    process = scorer._worker._process
    scorer.close()
    scorer.close()
    assert process.returncode is not None


def test_bare_references_are_read_as_latex() -> None:
    # In this process, with no deadline: what the child computes.
    assert equal("x^2+1", "$1+x^2$")
    assert equal("2\\sqrt{3}", "$\\sqrt{12}$")
    assert not equal("(1, 2)", "$(1, 3)$")
    with pytest.raises(ValueError, match="no mathematics"):
        equal("?", "1")
