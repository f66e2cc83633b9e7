"""Placement and dtype of judges on GPUs."""

from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.config.environment import judges_of_the_run
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.defaults import with_defaults_of
from tasks.recipes.grpo import GRPORecipe

JUDGE: dict[str, Any] = {"kind": "llm_judge", "judge": {"kind": "model", "model": "folder"}}
DEDICATED = {**JUDGE, "judge": {**JUDGE["judge"], "placement": {"own": 1}}}
SERVED = {"kind": "llm_judge", "judge": {"kind": "endpoint", "url": "http://here/v1", "model": "m"}}
GPUS = {"shape": "cluster", "num_workers": 2}
OWN = {"placement": {"own": 2}}


def with_game(judge: dict[str, Any]) -> dict[str, Any]:
    game = {"task": "game", "environment": {"kind": "guess_number"}}
    return {"kind": "by_task", "tasks": [{"task": "talk", "environment": judge}, game]}


@pytest.mark.parametrize(
    ("environment", "generation", "is_ahead", "fix"),
    [
        (JUDGE, {}, True, "generation.placement: {own: 1}, or serve the judge"),
        (with_game(JUDGE), {}, False, "generation.placement: {own: 1}, or serve the judge"),
        (with_game(JUDGE), {}, True, "judge a dedicated GPU, judge.placement: {own: 1}"),
        (with_game(JUDGE), OWN, True, "judge.placement: {own: 1}, or serve the judge"),
        (DEDICATED, {}, True, None),
        (with_game(DEDICATED), {}, False, None),
        (with_game(DEDICATED), {}, True, None),
        (with_game(DEDICATED), OWN, True, None),
        (JUDGE, {}, False, None),
        (JUDGE, OWN, True, None),
        (with_game(JUDGE), OWN, False, None),
        (SERVED, {}, True, None),
        (with_game(SERVED), OWN, True, None),
    ],
)
def test_judge_scores_while_nothing_else_uses_its_gpu(
    environment: dict[str, Any], generation: dict[str, Any], is_ahead: bool, fix: str | None
) -> None:
    settings = {
        "environment": environment,
        "generation": generation,
        "grpo": {"asynchronous": {"max_staleness": 1}} if is_ahead else {},
        "evaluation": {"environment": {"kind": "exact"}},
    }
    GRPORecipe.model_validate(settings)  # no conflict on CPUs
    on_gpus = {**settings, "cluster": GPUS}
    of_trainer = {name: value for name, value in on_gpus.items() if name != "evaluation"}
    if fix is None:
        GRPORecipe.model_validate(on_gpus).refuse_contradictions()
        GRPOSettings.model_validate(of_trainer)
        return
    with pytest.raises(ConfigError, match="would score") as refused:
        GRPORecipe.model_validate(on_gpus).refuse_contradictions()
    assert fix in str(refused.value)
    with pytest.raises(ConfigError, match="would score"):
        GRPOSettings.model_validate(of_trainer)


def test_evaluation_of_conversations_is_checked_too() -> None:
    measured = {"evaluation": {"environment": with_game(JUDGE)}, "cluster": GPUS}
    with pytest.raises(ConfigError, match="samples on the same GPU"):
        GRPORecipe.model_validate(measured)
    with pytest.raises(ConfigError, match="samples on the same GPU"):
        RolloutSettings.model_validate({"environment": with_game(JUDGE), "cluster": GPUS})
    dedicated = {"evaluation": {**measured["evaluation"], "generation": OWN}, "cluster": GPUS}
    GRPORecipe.model_validate(dedicated)


@pytest.mark.parametrize(
    ("cluster", "changes", "expected"),
    [
        ({"shape": "one_gpu"}, {}, "bfloat16"),
        ({"shape": "one_gpu"}, {"dtype": "float32"}, "float32"),
        ({}, {}, "float32"),
    ],
)
def test_a_judge_computes_in_bfloat16_on_gpus(
    cluster: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    judge = {**JUDGE, "judge": {**JUDGE["judge"], **changes}}
    summed = {"kind": "weighted_sum", "parts": [{"weight": 2.0, "environment": judge}]}
    values = {"environment": summed, "cluster": cluster, "evaluation": {"environment": judge}}
    recipe = GRPORecipe.model_validate(values)
    judges = [judges_of_the_run(each)[0] for each in recipe.rewards]
    assert [each.dtype for each in judges] == [expected, expected]
    read_again = GRPORecipe.model_validate_json(recipe.model_dump_json())
    assert read_again == recipe
    assert "dtype" not in JUDGE["judge"]
    # A trainer in Python uses the same defaults for a pretrained model.
    del values["evaluation"]
    defaults = with_defaults_of("org/model", values, GRPOTrainer)
    assert judges_of_the_run(GRPOSettings.model_validate(defaults).environment)[0].dtype == expected
