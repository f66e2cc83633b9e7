"""A sweep's recipe: its points, and what is refused."""

from typing import Any

import pytest

from tasks.experiments.sweep import SweepExperiment, plan_sweep
from tasks.recipe import RecipeError

BASE = {"recipe": "grpo_arithmetic"}


def sweep(**over: Any) -> SweepExperiment:
    return SweepExperiment.model_validate({"base": BASE, "over": over})


def test_points_are_all_combinations_laid_over_the_recipe() -> None:
    config = sweep(seed=[0, 3], **{"grpo.learning_rate": [1e-4, 2e-4], "grpo.loss.kl.beta": [0.1]})
    assert len(config.points) == 4
    assert config.points[1] == {"seed": 0, "grpo.learning_rate": 2e-4, "grpo.loss.kl.beta": 0.1}
    last = config.experiment(config.points[-1])
    assert (last.seed, last.grpo.learning_rate) == (3, 2e-4)
    assert last.grpo.num_iterations == config.base.grpo.num_iterations


def test_points_that_differ_in_the_algorithm_alone_begin_alike() -> None:
    plan = plan_sweep(config=sweep(seed=[0, 1], **{"grpo.learning_rate": [1e-4, 2e-4]}))
    starts = [(each.model, each.data, each.questions, each.sft) for each in plan.points]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert len({str(each.point) for each in plan.points}) == 4


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"grpo.lerning_rate": [1e-4]}, "lerning_rate"),
        ({"seed": []}, "one or more values"),
        ({"seed": [1, 1]}, "one or more values, each once"),
        ({"grpo.learning_rate": [-1.0]}, "learning_rate"),
    ],
)
def test_what_no_point_can_take_is_refused(over: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        config = sweep(**over)
        [config.experiment(point) for point in config.points]
