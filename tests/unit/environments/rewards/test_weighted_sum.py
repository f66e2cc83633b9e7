import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.config.environment import EnvironmentConfig, WeightedSum
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import Scorer, raise_first, score_rollouts
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.weighted_sum import WeightedSumScorer
from nemo_rl_core.errors import RewardError

PARTS = [
    {"weight": 2, "environment": {"kind": "exact"}},
    {"weight": -0.5, "environment": {"kind": "function", "target": "part_lengths:num_signs"}},
]


def num_signs(prompt: str, response: str) -> float:
    if response == "boom":
        raise ValueError("boom")
    return float(len(response))


def fails(prompt: str, response: str) -> float:
    raise ValueError("always")


@pytest.fixture
def from_config(tmp_path, monkeypatch):
    (tmp_path / "part_lengths.py").write_text(
        "def num_signs(prompt: str, response: str) -> float:\n    return float(len(response))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return make_scorer(WeightedSum.model_validate({"parts": PARTS}))


def test_the_reward_is_the_weighted_sum_and_components_are_the_parts(from_config, rollout):
    right, wrong = score_rollouts(from_config, [rollout("46"), rollout("four")])
    assert (right.reward, right.components) == (2 * 1 - 0.5 * 2, (1.0, 2.0))
    assert (wrong.reward, wrong.components) == (2 * 0 - 0.5 * 4, (0.0, 4.0))
    assert (right.text, right.prompt.answer) == ("46", "46")


def test_the_score_is_the_sum(from_config, rollout):
    rollouts = [rollout("46"), rollout("four")]
    assert from_config.score(rollouts) == [1.0, -2.0]
    assert score_rollouts(from_config, []) == []


def test_a_failing_part_fails_only_its_rollout(rollout):
    scorer = WeightedSumScorer(
        [make_scorer(ExactMatch()), FunctionalRewardWrapper(num_signs)], [1.0, 10.0]
    )
    rollouts = [rollout("46"), rollout("boom"), rollout("7")]
    first, failed, last = scorer.score(rollouts)
    assert (first, last) == (1.0 + 10 * 2, 0.0 + 10 * 1)
    assert isinstance(failed, RewardError)
    assert "'num_signs' raised" in str(failed)
    with pytest.raises(RewardError, match="num_signs"):
        raise_first(scorer.score(rollouts))


def test_the_first_failing_part_gives_the_error(rollout):
    parts = [FunctionalRewardWrapper(fails, name=name) for name in ("one", "two")]
    (outcome,) = WeightedSumScorer(parts, [1.0, 1.0]).score([rollout("46")])
    assert "'one'" in str(outcome)


def test_closing_reaches_every_part_even_when_one_of_them_fails():
    closed = []

    class Part(Scorer):
        def __init__(self, name):
            self._name = name

        def score(self, rollouts):
            return [0.0] * len(rollouts)

        def close(self):
            closed.append(self._name)
            if self._name == "b":
                raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        WeightedSumScorer([Part("a"), Part("b"), Part("c")], [1, 1, 1]).close()
    assert sorted(closed) == ["a", "b", "c"]


def test_a_scorer_of_one_reward_has_no_components(rollout):
    (scored,) = score_rollouts(make_scorer(ExactMatch()), [rollout("46")])
    assert (scored.reward, scored.components) == (1.0, ())


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [{"weight": float("nan"), "environment": {"kind": "exact"}}],
        [{"environment": {"kind": "weighted_sum", "parts": PARTS}}],
    ],
)
def test_sums_of_nothing_of_nan_and_of_sums_are_refused(parts):
    with pytest.raises(ValidationError):
        WeightedSum.model_validate({"parts": parts})


def test_flyte_carries_every_field_of_the_config():
    from flytekit import FlyteContext
    from flytekit.core.type_engine import TypeEngine

    from tasks.stage import literal_types

    literal_types.register()
    literal_type = TypeEngine.to_literal_type(WeightedSum)
    assert literal_type.structure.tag == "WeightedSum"
    config = WeightedSum.model_validate({"parts": PARTS})
    context = FlyteContext.current_context()
    literal = TypeEngine.to_literal(context, config, WeightedSum, literal_type)
    assert TypeEngine.to_python_value(context, literal, WeightedSum) == config


def test_a_recipe_selects_a_weighted_sum_by_kind():
    adapter = TypeAdapter(EnvironmentConfig)
    config = adapter.validate_python({"kind": "weighted_sum", "parts": PARTS})
    assert [part.weight for part in config.parts] == [2.0, -0.5]
    assert adapter.validate_json(adapter.dump_json(config)) == config


def large(prompt: str, response: str) -> float:
    return 3e38


def test_a_sum_beyond_float32_is_a_failure_of_its_row(rollout):
    scorer = WeightedSumScorer([FunctionalRewardWrapper(large), make_scorer(ExactMatch())], [2, 1])
    (failed,) = score_rollouts(scorer, [rollout("46")])
    assert failed.reward is None
    assert "the weighted sum returned a number that is not finite in float32" in failed.error
    (outcome,) = scorer.score([rollout("46")])
    assert isinstance(outcome, RewardError)
    with pytest.raises(RewardError, match="float32"):
        raise_first(scorer.score([rollout("46")]))
