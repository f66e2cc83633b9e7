"""Recipe of an evaluation, and explanations of a promotion."""

import json
from pathlib import Path

import pytest

from nemo_rl_core.config.evaluation import PromotionConfig
from nemo_rl_core.evals.comparison import compare, compare_pairs, pair_metrics, pair_scores
from tasks.promote import explain, promotes
from tasks.recipes.common import EvaluationTaskConfig, RecipeError
from tasks.recipes.evaluate import EvaluateRecipe


def recipe(**values: object) -> EvaluateRecipe:
    return EvaluateRecipe.model_validate(values)


def test_only_the_validation_rows_need_a_name(tmp_path: Path) -> None:
    file = recipe(data={"kind": "file", "validation": "test.jsonl"})
    assert (file.data.train, file.data.validation) == ("test.jsonl", "test.jsonl")
    hub = recipe(data={"kind": "hub", "name": "some/set", "validation": "test"})
    assert (hub.data.train, hub.data.validation) == ("test", "test")
    # Without the name of a split, a share of the training split is held out, as in training.
    assert recipe(data={"kind": "hub", "name": "some/set"}).data.validation is None
    assert recipe(data=json.loads(file.data.model_dump_json())).data == file.data
    suite = recipe(data={"kind": "reasoning_gym", "tasks": ["chain_sum", "gcd"]})
    assert suite.data.tasks == ["chain_sum", "gcd"]


def test_an_artifact_of_a_run_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    local = recipe(model={"name": str(tmp_path)}, baseline={"name": str(tmp_path / "model")})
    assert [model.name for model in local.models] == [str(tmp_path / "model")] * 2
    assert [model.name for model in recipe(model={"name": "some/hub-name"}).models] == [
        "some/hub-name"
    ]


def test_a_wrong_key_is_refused() -> None:
    with pytest.raises(RecipeError, match="baseline"):
        recipe(basline={"name": "x"})


def test_questions_need_no_training_rows() -> None:
    file = {"kind": "file", "validation": "asked.jsonl"}
    assert recipe(evaluation={"data": file}).question_data.train == "asked.jsonl"
    both = recipe(evaluation={"data": {**file, "train": "other.jsonl"}}).question_data
    assert (both.train, both.validation) == ("other.jsonl", "asked.jsonl")
    # A share of rows that are named only as training rows is held out, as in training.
    training_only = {"kind": "file", "train": "rows.jsonl"}
    assert recipe(evaluation={"data": training_only}).question_data.validation is None
    mixture = {"kind": "mixture", "sources": [{"data": file}]}
    assert recipe(evaluation={"data": mixture}).question_data.sources[0].data.train == "asked.jsonl"


def test_evaluation_may_have_separate_sampling_settings() -> None:
    changed = recipe(
        generation={"max_new_tokens": 5},
        evaluation={"generation": {"max_new_tokens": 9, "temperature": 0.5}},
    )
    stage = EvaluationTaskConfig.of(changed)
    assert (stage.generation.max_new_tokens, stage.generation.temperature) == (9, 0.5)
    # Normalized, so that both spellings in a recipe give the same stage.
    direct = recipe(generation={"max_new_tokens": 9, "temperature": 0.5})
    assert EvaluationTaskConfig.of(direct) == stage


def explained(gained: int, lost: int, total: int, margin: float = 0.0) -> str:
    before = {str(index): gained <= index < gained + lost for index in range(total)}
    after = {str(index): index < gained for index in range(total)}
    compared = compare(before, after, confidence=0.95)
    return explain(compared, PromotionConfig(min_improvement=margin))


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "promoted"),
    [
        (4, 0, 0.0, False),  # McNemar: 2 / 2^4 = 0.125
        (5, 0, 0.0, False),  # 2 / 2^5 = 0.0625
        (6, 0, 0.0, True),  # 2 / 2^6 = 0.03125
        (9, 1, 0.0, True),  # 2 * 11 / 2^10 = 0.021
        (8, 2, 0.0, False),  # 2 * 56 / 2^10 = 0.109
        (0, 0, 0.0, False),
        (0, 9, 0.0, False),
        (30, 5, 0.0, True),
        (30, 5, 0.12, False),  # a mean of 25 points, and a lower bound of 10.2
        (30, 5, 0.05, True),
        (1, 3, -0.2, True),  # not worse by more than 20 points
    ],
)
def test_a_model_is_promoted_by_the_lower_bound(
    gained: int, lost: int, margin: float, promoted: bool
) -> None:
    before = {str(index): gained <= index < gained + lost for index in range(100)}
    after = {str(index): index < gained for index in range(100)}
    compared = compare(before, after, confidence=0.95)
    assert promotes(compared, PromotionConfig(min_improvement=margin)) == promoted
    if margin == 0:
        assert promoted == (gained > lost and compared.p_value < 0.05)


def test_a_verdict_on_pairs_names_pairs() -> None:
    def rows(num_gained: int, num_lost: int, num_equal: int = 0) -> list[dict[str, object]]:
        margins = [2.0] * num_gained + [-1.0] * num_lost + [0.0] * num_equal
        return [{"id": "x", "chosen_score": margin, "rejected_score": 0.0} for margin in margins]

    compared = compare_pairs(rows(6, 0), confidence=0.95)
    assert (compared.before, compared.after, compared.gained, compared.lost) == (0.5, 1.0, 6, 0)
    assert compared.p_value == 2 / 2**6
    explanation = explain(compared, PromotionConfig(), measured_on="pairs")
    assert explanation.startswith("promoted: +50.0 points [+2.2, +50.0] of pair accuracy from 50 %")
    few = compare_pairs(rows(4, 0, num_equal=4), confidence=0.95)
    assert (few.after, few.difference) == (0.75, 0.25)
    assert not promotes(few, PromotionConfig())  # 4 gained, 0 lost: p = 0.125
    assert "on 8 pairs" in explain(
        compare_pairs(rows(1, 7), confidence=0.95), PromotionConfig(), measured_on="pairs"
    )


def test_scores_of_pairs_by_hand() -> None:
    start = [{"id": "a", "chosen": [-1.0, -2.0], "rejected": [-1.0]}]
    trained = [{"id": "a", "chosen": [-0.5, -0.5], "rejected": [-3.0]}]
    # chosen: 0.5 + 1.5 = 2 in sum, 1 per token; rejected: -2 in both.
    (summed,) = pair_scores(start, trained, per_token=False)
    assert summed == {"id": "a", "chosen_score": 2.0, "rejected_score": -2.0}
    (mean,) = pair_scores(start, trained, per_token=True)
    assert (mean["chosen_score"], mean["rejected_score"]) == (1.0, -2.0)
    metrics = pair_metrics([summed, {**summed, "rejected_score": 2.0}], confidence=0.95)
    assert (metrics["num_pairs"], metrics["accuracy"], metrics["margin"]) == (2, 0.5, 2.0)


def test_a_promotion_is_explained() -> None:
    assert explained(50, 5, 100).startswith("promoted: +45.0 points [")
    worse = explained(5, 10, 100)
    assert worse.startswith("NOT promoted: -5.0 points [")
    assert "did not improve by more than +0.0 on 100 prompts" in worse
    unsure = explained(6, 3, 100)
    assert "lower bound must exceed +0.0, so this may be chance" in unsure
    # scale (1.959964 * 10 + 0.841621 sqrt(96.866867)) / 100.708326 = 0.276868; times sqrt(0.09)
    assert "a true difference below 8.3 points would usually not have been detected" in unsure
    assert "must exceed +40.0" in explained(50, 5, 100, margin=0.4)
    assert "did not improve by more than +50.0" in explained(50, 5, 100, margin=0.5)
