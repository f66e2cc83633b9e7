import json
from collections.abc import Callable

import pytest

from nemo_rl_core.config.single_turn import ReasoningGymScore
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import raise_first
from nemo_rl_core.environments.rewards.reasoning_gym import candidate_answers
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Make = Callable[..., Rollout]


@pytest.mark.parametrize(
    ("completion", "reference", "candidates"),
    [
        ("12", "12", ["12", "12"]),
        (" 12 \n", "12", ["12", "12"]),
        ("7 + 5 = 12.", "12", ["7 + 5 = 12.", "12"]),
        ("5-3", "2", ["5-3", "3"]),
        ("it is -3", "-3", ["it is -3", "-3"]),
        ("it is \u22123", "-3", ["it is \u22123", "-3"]),
        ("so 1,234.50!", "1234.5", ["so 1,234.50!", "1,234.50"]),
        ("x3 only", "3", ["x3 only"]),
        ("none", "12", ["none"]),
        ("say 12", "twelve", ["say 12"]),
        ("<answer> 12 </answer> or 13", "12", ["12"]),
        ("<answer>1</answer><answer>2</answer>", "2", ["2"]),
        ("<answer>12", "12", ["<answer>12", "12"]),
        ("</answer>12<answer>", "12", ["</answer>12<answer>", "12"]),
        ("", "12", [""]),
    ],
)
def test_candidates(completion: str, reference: str, candidates: list[str]) -> None:
    assert candidate_answers(completion, reference) == candidates


def test_candidates_of_hostile_megabytes_are_found_in_linear_time() -> None:
    for text in ("<answer>" * 125_000, "</answer>" * 111_000, "1" * 1_000_000, "1," * 500_000):
        assert candidate_answers(text, "12")[0] == text


def _stored(task: str, answer: str, **options: object) -> str:
    entry = {"question": "q", "answer": answer, "metadata": {}}
    return json.dumps({"task": task, "options": options, "entry": entry})


def test_scores_are_those_of_the_task(rollout: Make) -> None:
    scorer = make_scorer(ReasoningGymScore())
    metadata = _stored("chain_sum", "12", min_terms=2, max_terms=3)
    texts = ["12", "7 + 5 = 12", "7 + 5 = 13", "<answer>12.0</answer>", "\u00e9\x00", ""]
    scores = scorer.score([rollout(t, answer="12", metadata=metadata) for t in texts])
    assert scores == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    scorer.close()


def test_an_answer_the_task_cannot_read_scores_zero(rollout: Make) -> None:
    # The scorer of prime_factorization raises ValueError on anything but numbers.
    scorer = make_scorer(ReasoningGymScore())
    entry = {"question": "q", "answer": "2 \u00d7 3", "metadata": {"number": 6, "factors": [2, 3]}}
    metadata = json.dumps({"task": "prime_factorization", "options": {}, "entry": entry})
    rollouts = [rollout(text, metadata=metadata) for text in ("2 \u00d7 3", "two times three")]
    assert scorer.score(rollouts) == [1.0, 0.0]


def test_a_task_that_cannot_score_its_own_answer_is_an_error(rollout: Make) -> None:
    entry = {"question": "q", "answer": "two times three"}
    metadata = json.dumps({"task": "prime_factorization", "options": {}, "entry": entry})
    with pytest.raises(RewardError, match="raised for prompt"):
        raise_first(
            make_scorer(ReasoningGymScore()).score([rollout("2 \u00d7 3", metadata=metadata)])
        )


@pytest.mark.parametrize("metadata", ["{}", "[]", "not json", '{"task": "x"}'])
def test_prompts_from_elsewhere_are_an_error(rollout: Make, metadata: str) -> None:
    with pytest.raises(RewardError):
        raise_first(make_scorer(ReasoningGymScore()).score([rollout("46", metadata=metadata)]))
