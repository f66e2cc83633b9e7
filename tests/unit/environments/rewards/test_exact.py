from collections.abc import Callable

from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.types import Rollout


def test_only_the_answer_itself_scores(rollout: Callable[..., Rollout]) -> None:
    scorer = make_scorer(ExactMatch())
    texts = ["46", " 46\n", "47", "046", "", "46 ", "4 6", "\u06f4\u06f6", "46" * 500_000]
    scores = scorer.score([rollout(text) for text in texts])
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert scorer.score([rollout("46"), rollout("4")]) == [1.0, 0.0]
    scorer.close()
