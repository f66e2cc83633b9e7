"""Tests with a real child process, which is shared, since each start imports sympy."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_rl_core.config.environment import ByTask
from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import raise_first
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.environments.rewards.math import MathScorer, _Worker
from nemo_rl_core.environments.rewards.math_answers import equal
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.types import Prompt, Rollout
from tests.graders.tables import KNOWN_FAULTS, SOLUTIONS, verdicts

Make = Callable[..., Rollout]


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    made = make_scorer(MathVerify(max_calls=200_000))
    assert isinstance(made, MathScorer)
    yield made
    made.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[_Worker]:
    made = _Worker()
    yield made
    made.stop()


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
        # Neither is computed.
        ("2^{1000000}", "$2^{1000000}$", 1.0),
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


@pytest.mark.slow
def test_a_megabyte_is_compared(scorer: MathScorer, rollout: Make) -> None:
    assert scorer.score([rollout("word " * 200_000 + "46"), rollout("1" * 1_000_000)]) == [1.0, 0.0]


SLOW = {
    "a tower of powers": "$9^{9^{9^{9}}}$",
    "the same without LaTeX": "9**9**9**9",
    "a long power": "$10^{100000000}$",
    "a power of a fraction": r"$(\frac{2}{3})^{100000000}$",
    "a negative power": "$7^{-100000000}$",
    "a root of a long power": r"$\sqrt[3]{10^{3000001}+1}$",
    "open brackets": r"\boxed{" + "(" * 10_000,
    "nested fractions": "$" + r"\frac{1}{" * 2000 + "1" + "}" * 2000 + "$",
    "nested roots": "$" + r"\sqrt{" * 500 + "2" + "}" * 500 + "$",
    "a binomial coefficient": r"$\binom{10^9}{10^8}$",
    "a factorial": "$(10^9)!$",
    "a long product": r"$\prod_{i=1}^{10000000} i$",
    "an integral": r"$\int_0^1 x^{x^x} e^{-x^2}\sin(x^3) dx$",
    "many terms": "$" + "+".join(f"x^{{{n}}}" for n in range(400)) + "$",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_completion_that_is_slow_to_compare_is_wrong(
    scorer: MathScorer, rollout: Make, name: str
) -> None:
    assert scorer.score([rollout(SLOW[name])]) == [0.0]


@pytest.mark.slow
def test_slow_comparisons_are_stopped_by_work_limits_and_not_by_time(worker: _Worker) -> None:
    # None of them reaches the limit on CPU time, which depends on the machine.
    for completion in SLOW.values():
        reply = worker.ask(_request(completion, max_calls=200_000, cpu_seconds=10_000))
        assert "CPU" not in reply.get("limit", "") and reply.get("score", 0.0) == 0.0, reply


def test_the_same_work_is_counted_each_time(worker: _Worker) -> None:
    # The minimum sufficient number of calls does not change after other comparisons.
    def suffices(calls: int) -> bool:
        return "score" in worker.ask(_request(r"$\sqrt{2116}$", max_calls=calls))

    low, high = 1, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    assert worker.ask(_request("$x^2$", answer="x^2")) == {"score": 1.0}
    assert [suffices(high), suffices(high - 1)] == [True, False]


def test_the_cpu_limit_ends_what_the_call_limit_does_not(worker: _Worker) -> None:
    request = _request(SLOW["an integral"], max_calls=10**9, cpu_seconds=1)
    assert worker.ask(request) == {"limit": "1 s of CPU time"}


def test_a_reference_that_cannot_be_compared_is_a_broken_row(rollout: Make) -> None:
    scorer = MathScorer(MathVerify(max_calls=5000))
    try:
        outcomes = scorer.score(
            [
                rollout("46"),
                rollout("46", answer=r"\int_0^1 x^{x^x} dx"),
                rollout("45", answer=r"\int_0^1 x^{x^x} dx"),
            ]
        )
        assert outcomes[0] == 1.0
        for outcome in outcomes[1:]:
            assert isinstance(outcome, RewardError)
            assert "cannot be compared: 5000 Python calls" in str(outcome)
    finally:
        scorer.close()


@pytest.mark.thorough
def test_512_slow_completions_are_compared_in_parallel(rollout: Make) -> None:
    # A size limit ends each of them. With only the limit on CPU time they would take three hours.
    scorer = MathScorer(MathVerify(num_parallel=3, cpu_seconds=60))
    try:
        slow = [
            rollout(text)
            for n in range(128)
            for text in (
                f"9**9**9**{n + 9}",
                r"\boxed{" + "(" * (10_000 + n),
                "$" + r"\frac{1}{" * 2000 + str(n) + "}" * 2000 + "$",
                rf"$\binom{{10^9}}{{10^8+{n}}}$",
            )
        ]
        assert scorer.score(slow) == [0.0] * 512
        assert all(worker is not None for worker in scorer._idle.queue)
    finally:
        scorer.close()


def _started(scorer: MathScorer) -> _Worker:
    worker = scorer._idle.queue[-1]
    assert worker is not None
    return worker


def _request(completion: str, **changed: Any) -> dict[str, Any]:
    limits = MathVerify().model_dump(include={"max_calls", "cpu_seconds"})
    return {"answer": "46", "completion": completion, **limits, **changed}


SENTENCES = [
    "The minimum value is 4, attained at x = 1",
    "No, because 4 is even",
    "x = 3.\nSo it is 4.",
]


@pytest.mark.parametrize("answer", ["", "?", "...", *SENTENCES])
def test_a_reference_without_mathematics_or_with_a_sentence_is_an_error(
    scorer: MathScorer, rollout: Make, answer: str
) -> None:
    with pytest.raises(RewardError, match="math-verify raised") as caught:
        raise_first(scorer.score([rollout(answer, answer=answer)]))
    assert "no mathematics, or a sentence" in str(caught.value)


@pytest.mark.slow
def test_a_dead_child_is_replaced(rollout: Make) -> None:
    scorer = MathScorer()
    try:
        assert scorer.score([rollout("46")]) == [1.0]
        _started(scorer)._process.kill()
        _started(scorer)._process.wait()
        (outcome,) = scorer.score([rollout("46")])
        assert isinstance(outcome, RewardError)
        assert scorer.score([rollout("46")]) == [1.0]
    finally:
        scorer.close()


def test_scoring_works_in_a_thread(scorer: MathScorer, rollout: Make) -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(scorer.score([rollout("46")])))
    thread.start()
    thread.join(timeout=500)
    assert scores == [1.0]


@pytest.mark.slow
def test_close_ends_every_child_and_may_be_called_twice(rollout: Make) -> None:
    scorer = MathScorer(MathVerify(max_calls=500_000))
    # Two comparisons at once need two children.
    scorer.score([rollout(SLOW["an integral"]), rollout(SLOW["an integral"] + " ")])
    children = [each._process for each in scorer._idle.queue if each is not None]
    assert len(children) == 2
    scorer.close()
    scorer.close()
    assert all(child.returncode is not None for child in children)


def test_bare_references_are_read_as_latex() -> None:
    # The child's computation, in this process and without limits.
    assert equal("x^2+1", "$1+x^2$")
    assert equal("2\\sqrt{3}", "$\\sqrt{12}$")
    assert not equal("(1, 2)", "$(1, 3)$")
    with pytest.raises(ValueError, match="no mathematics"):
        equal("?", "1")


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        (r"20 \text{ cm}", r"\boxed{20\text{ m}}", 0.0),
        (r"5\text{ cm}^2", r"\boxed{5\text{ cm}^3}", 0.0),
        ("60 km/h", "The average speed was 60 km per hour.", 1.0),
        ("3", "Answer: There are 3 boxes of 7 each so the total is 21.", 0.0),
        ("1,2", "The answers are 1, 2, and 3.", 0.0),
        ("1,2,3", "The answers are 1, 2, and 3.", 1.0),
        ("10", "The train arrives at 10:13.", 0.0),
        ("3", "The ratio is **3:5**.", 0.0),
        ("p - q", r"\boxed{-q+p}", 1.0),
        ("4", "It is 4", 1.0),
        ("4", "so 4", 1.0),
        ("4", "The sum is 4, I say", 1.0),
        (r"\emptyset", r"\boxed{\varnothing}", 1.0),
    ],
)
def test_answers_that_look_like_others(
    scorer: MathScorer, rollout: Make, answer: str, completion: str, score: float
) -> None:
    assert scorer.score([rollout(completion, answer=answer)]) == [score]


@pytest.mark.slow
def test_verdicts_of_the_table() -> None:
    wrong = {row for row, score in verdicts() if score != row.score}
    assert wrong == KNOWN_FAULTS
    assert all(row.score == 1 for row in wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        *("7", "-5", "1/2", r"\frac{1}{2}", r"\$18.90", r"\$32,\!348", "$36", "1,234,567", r"50\%"),
        *("2 2/3", r"2\frac{2}{3}", "½", "√2", "x²+1", "∞", "€5", "12:00", "3:45 p.m.", "3:4"),
        *("1.6e-19", "18 dollars", "20 km/h", r"5\text{ cm}^2", r"90^\circ", "CAB", "no", "(A)"),
        *(r"\text{Tuesday}", "New York", "日本", r"x^2+1", "y=2x+3", r"\{1,2\}", "(1,2)", "[0,1)"),
        *(
            r"\left.\frac12\right.",
            "P(A|B)",
            r"\neg p",
            r"A \cap B",
            r"\begin{pmatrix}1&2\end{pmatrix}",
        ),
    ],
)
def test_a_repeated_reference_scores_one(scorer: MathScorer, rollout: Make, answer: str) -> None:
    texts = [f"\\boxed{{{answer}}}", f"<think>9</think><answer>{answer}</answer>"]
    assert scorer.score([rollout(text, answer=answer) for text in texts]) == [1.0, 1.0]


@pytest.mark.slow
def test_reference_answers_are_checked_before_anything_is_scored() -> None:
    prose = (
        "Every subset has an upper bound, and so the lemma of Zorn gives a largest element of it."
    )
    golds = ["7", "-3.5", r"\$36", r"\$32,\!348", r"\frac{1}{2}", "½", "12:00", prose, "4 km"] * 3
    rows = [
        Prompt(str(row), "?", (), gold, "proofs" if row == 25 else "sums")
        for row, gold in enumerate(golds)
    ]
    with pytest.raises(DataError, match="3 of 27 rows of the train data set cannot be") as caught:
        refuse_incomplete_rows(rows, MathVerify(), name="train")
    assert caught.value.got is not None
    assert [f"row {row}" in caught.value.got for row in (7, 8, 16, 25)] == [True, False, True, True]
    by_task = {"proofs": {"kind": "exact"}, "sums": {"kind": "math"}}
    tasks = [{"task": name, "environment": each} for name, each in by_task.items()]
    with pytest.raises(DataError, match="2 of 27 rows"):
        refuse_incomplete_rows(rows, ByTask.model_validate({"tasks": tasks}), name="train")
    sound = [row for row in rows if row.answer != prose]
    refuse_incomplete_rows(sound, MathVerify(), name="train")


@pytest.mark.slow
def test_reference_solutions_and_answers_score_one(rollout: Make) -> None:
    scorer = MathScorer()
    parts = [read([row], seed=0) for _, row in SOLUTIONS]
    rows = [row for part in parts for row in part.train]
    try:
        for column in ("completion", "answer"):
            scores = scorer.score([rollout(row[column], answer=row["answer"]) for row in rows])
            pairs = zip(rows, scores, strict=True)
            assert [(row[column], row["answer"]) for row, score in pairs if score != 1.0] == []
    finally:
        scorer.close()
    names = [part.read_as.split(":")[0] for part in parts]
    assert names == [name for name, _ in SOLUTIONS]
