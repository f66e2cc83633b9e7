"""Judges and reward models on bundles of their own: what a recipe may ask for."""

from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained
from nemo_rl_core.config.environment import (
    EnvironmentWorkers,
    WeightedSum,
    model_scorers,
    own_bundles_of_scorers,
)
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.single_turn import ExactMatch, RewardModelScore
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.errors import ConfigError
from tasks.platform.shapes import shape_of
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe

OWN = {"own": 2}
JUDGE: dict[str, Any] = {
    "kind": "llm_judge",
    "judge": {"kind": "model", "model": "folder", "placement": OWN},
}
MODEL: dict[str, Any] = {"kind": "reward_model", "model": "folder", "placement": {"own": 1}}


def test_what_a_recipe_does_not_say_is_in_no_key() -> None:
    for config in (JudgeModel(model="folder"), RewardModelScore(model="folder")):
        assert "placement" not in config.model_dump()
        assert config.own_bundles("any", "path") == ()
        assert type(config).model_validate({**config.model_dump(), "placement": "colocated"}) == (
            config
        )
        own = type(config).model_validate({**config.model_dump(), "placement": OWN})
        assert own.model_dump(mode="json")["placement"] == OWN
        assert type(config).model_validate_json(own.model_dump_json()) == own


def test_models_that_are_asked_alike_share_their_workers() -> None:
    def judge(model: str, **options: Any) -> dict[str, Any]:
        return {"environment": {**JUDGE, "judge": {**JUDGE["judge"], "model": model}, **options}}

    environment = WeightedSum(
        parts=[
            judge("a"),
            {"environment": ExactMatch()},
            judge("b"),
            judge("a", instruction="Say how short it is."),
            judge("a", max_new_tokens=16),
            {"environment": MODEL},
            {"environment": RewardModelScore(model="other")},
            {"environment": MODEL},
        ]
    )
    assert [each.name for each in model_scorers(environment)] == [
        "judge", "judge-2", "judge", "judge-3", "reward-model", "reward-model-2", "reward-model"
    ]  # fmt: skip
    own = own_bundles_of_scorers(environment, "grpo_reward")
    assert own == (
        OwnBundles("judge", 2),
        OwnBundles("judge-2", 2),
        OwnBundles("judge-3", 2),
        OwnBundles("reward-model", 1),
    )
    assert own[-1].path == "grpo_reward.parts.5.environment.placement.own"
    assert own[1].path == "grpo_reward.parts.2.environment.judge.placement.own"


def test_their_gpus_are_those_of_the_stage() -> None:
    settings = RolloutSettings.model_validate(
        {
            "environment": JUDGE,
            "cluster": {"shape": "cluster", "num_workers": 4},
            "generation": {"placement": {"own": 4}, "tensor_parallel_size": 4},
        }
    )
    assert settings.own_bundles == (OwnBundles("generation", 4, 4), OwnBundles("judge", 2))
    shape = shape_of(settings.cluster, settings.own_bundles)
    assert (shape.num_gpus, shape.name) == (10, "cluster:4:8:any:8x1-2x1")
    assert shape_of(ClusterConfig(), settings.own_bundles) == shape_of(ClusterConfig())


def test_a_judge_may_be_spread_over_gpus_of_its_own() -> None:
    judge = JudgeModel(model="folder", placement={"own": 4}, tensor_parallel_size=2)
    assert judge.own_bundles("judge", "x") == (OwnBundles("judge", 4, ranks_per_engine=2),)
    assert JudgeModel.model_validate_json(judge.model_dump_json()) == judge
    assert "tensor_parallel_size" not in JudgeModel(model="folder").model_dump()
    for placement, got in (("colocated", "colocated"), ({"own": 3}, "{own: 3}")):
        with pytest.raises(ConfigError, match="does not fill its bundles") as refused:
            JudgeModel(model="folder", placement=placement, tensor_parallel_size=2)
        assert refused.value.got == f"placement: {got}"
    assert refused.value.fix.startswith("set placement.own to 4")


@pytest.mark.parametrize(
    ("cluster", "environment", "expected", "fix"),
    [
        (
            {"shape": "one_gpu"},
            MODEL,
            "cluster.num_workers and environment.placement.own of at most 1 together",
            "set cluster.shape to cluster",
        ),
        (
            {"shape": "node_8gpu"},
            JUDGE,
            "cluster.num_workers and environment.judge.placement.own of at most 8 together",
            "set cluster.num_workers to 6",
        ),
    ],
)
def test_a_shape_without_room_for_them_is_refused(
    cluster: dict[str, Any], environment: dict[str, Any], expected: str, fix: str
) -> None:
    for kind in (RolloutSettings, GRPORecipe):
        with pytest.raises(ConfigError, match="for models that score of their own") as refused:
            kind.model_validate({"cluster": cluster, "environment": environment})
        assert refused.value.expected == expected
        assert fix in refused.value.fix


def test_every_section_that_scores_is_counted() -> None:
    cluster = {"shape": "node_8gpu", "num_workers": 4}
    sampled = {"cluster": cluster, "generation": {"placement": {"own": 2}}}
    GRPORecipe.model_validate({**sampled, "environment": JUDGE})
    three = {**JUDGE, "judge": {**JUDGE["judge"], "placement": {"own": 3}}}
    measured = {**sampled, "evaluation": {"environment": three}}
    with pytest.raises(ConfigError) as refused:
        GRPORecipe.model_validate(measured)
    assert refused.value.expected == (
        "cluster.num_workers, generation.placement.own and "
        "evaluation.environment.judge.placement.own of at most 8 together"
    )
    assert refused.value.got == "4, 2 and 3"
    with pytest.raises(ConfigError, match="engines and models that score"):
        PostTrainRecipe.model_validate({**sampled, "grpo_reward": three})
    recipe = GRPORecipe.model_validate(
        {**measured, "environment": MODEL, "cluster": {"shape": "cluster", "num_workers": 4}}
    )
    assert [each.number for each in recipe.own_bundles] == [2, 3]


def test_a_reward_model_has_its_own_actors_or_the_environment_has() -> None:
    workers = {"environment_workers": EnvironmentWorkers().model_dump()}
    for kind in (RolloutSettings, GRPORecipe):
        kind.model_validate({"environment": {"kind": "reward_model", "model": "any"}, **workers})
        with pytest.raises(ConfigError, match="actors of its own") as refused:
            kind.model_validate({"environment": MODEL, **workers})
        assert "environment.placement.own" in refused.value.got


@pytest.mark.parametrize("judge_first", [True, False])
def test_a_judge_of_the_run_is_refused_in_actors_wherever_it_stands(judge_first: bool) -> None:
    workers = {"environment_workers": EnvironmentWorkers().model_dump()}
    parts = [{"environment": each} for each in ([JUDGE, MODEL] if judge_first else [MODEL, JUDGE])]
    both = {"kind": "weighted_sum", "parts": parts}
    for environment in (both, JUDGE):
        with pytest.raises(ConfigError, match="cannot be started by an actor") as refused:
            RolloutSettings.model_validate({"environment": environment, **workers})
        assert "judge: {kind: endpoint}" in refused.value.fix


@pytest.mark.parametrize(
    ("placement", "said"),
    [("own", "colocated, or {own: 4}"), ({"own": 0}, "greater than 0")],
)
def test_another_placement_is_refused_by_its_path(placement: Any, said: str) -> None:
    values = {"environment": {**JUDGE, "judge": {**JUDGE["judge"], "placement": placement}}}
    with pytest.raises(Exception) as caught:
        RolloutSettings.model_validate(values)
    shown = str(caught.value if isinstance(caught.value, ConfigError) else
                describe(caught.value, values))  # fmt: skip
    assert "environment" in shown
    assert "judge.placement" in shown
    assert said in shown


@pytest.mark.parametrize(
    ("cluster", "said", "share"),
    [
        ({"shape": "cluster"}, {"placement": OWN}, 0.9),
        ({"shape": "cluster"}, {"placement": OWN, "gpu_memory_utilization": 0.3}, 0.3),
        ({"shape": "cluster"}, {}, 0.5),
        ({}, {"placement": OWN}, 0.5),
    ],
)
def test_a_judge_takes_most_of_gpus_of_its_own(
    cluster: dict[str, Any], said: dict[str, Any], share: float
) -> None:
    judge = {"kind": "model", "model": "folder", **said}
    values = {"environment": {"kind": "llm_judge", "judge": judge}, "cluster": cluster}
    environment = GRPORecipe.model_validate(values).environment
    assert isinstance(environment, LLMJudge)
    assert isinstance(environment.judge, JudgeModel)
    assert environment.judge.gpu_memory_utilization == share


def test_a_machine_is_divided_between_trainer_and_scorers() -> None:
    def cluster_of(**values: Any) -> Any:
        return defaults_of_pretrained(
            values, section="grpo", samples=True, context=DefaultsContext(num_gpus=8)
        )["cluster"]

    assert cluster_of(environment=JUDGE) == {"shape": "node_8gpu", "num_workers": 6}
    own = {"placement": {"own": 1}}
    assert cluster_of(environment=MODEL, generation=own)["num_workers"] == 6
    assert cluster_of(environment={"kind": "exact"})["num_workers"] == 8
    assert cluster_of(environment={"kind": "not known"})["num_workers"] == 8
