"""Recipes with judges and reward models on dedicated bundles."""

from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained
from nemo_rl_core.config.environment import (
    EnvironmentWorkers,
    WeightedSum,
    dedicated_bundles_of_scorers,
    model_scorers,
)
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import ExactMatch, RewardModelScore
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.errors import ConfigError
from tasks.pods.shapes import shape_of
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe

OWN = {"own": 2}
JUDGE: dict[str, Any] = {
    "kind": "llm_judge",
    "judge": {"kind": "model", "model": "folder", "placement": OWN},
}
MODEL: dict[str, Any] = {"kind": "reward_model", "model": "folder", "placement": {"own": 1}}


def test_default_settings_are_not_in_keys() -> None:
    for config in (JudgeModel(model="folder"), RewardModelScore(model="folder")):
        assert "placement" not in config.model_dump()
        assert config.dedicated_bundles("any", "path") == ()
        assert type(config).model_validate({**config.model_dump(), "placement": "colocated"}) == (
            config
        )
        dedicated = type(config).model_validate({**config.model_dump(), "placement": OWN})
        assert dedicated.model_dump(mode="json")["placement"] == OWN
        assert type(config).model_validate_json(dedicated.model_dump_json()) == dedicated


def test_models_with_equal_settings_share_workers() -> None:
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
    bundles = dedicated_bundles_of_scorers(environment, "grpo_reward")
    assert bundles == (
        DedicatedBundles("judge", 2),
        DedicatedBundles("judge-2", 2),
        DedicatedBundles("judge-3", 2),
        DedicatedBundles("reward-model", 1),
    )
    assert bundles[-1].path == "grpo_reward.parts.5.environment.placement.own"
    assert bundles[1].path == "grpo_reward.parts.2.environment.judge.placement.own"


def test_stage_counts_the_gpus_of_its_scorers() -> None:
    settings = RolloutSettings.model_validate(
        {
            "environment": JUDGE,
            "cluster": {"shape": "cluster", "num_workers": 4},
            "generation": {"placement": {"own": 4}, "tensor_parallel_size": 4},
        }
    )
    assert settings.dedicated_bundles == (
        DedicatedBundles("generation", 4, 4),
        DedicatedBundles("judge", 2),
    )
    shape = shape_of(settings.cluster, settings.dedicated_bundles)
    assert (shape.num_gpus, shape.name) == (10, "cluster:4:8:any:8x1-2x1")
    assert shape_of(ClusterConfig(), settings.dedicated_bundles) == shape_of(ClusterConfig())


def test_judge_may_use_several_dedicated_gpus() -> None:
    judge = JudgeModel(model="folder", placement={"own": 4}, tensor_parallel_size=2)
    assert judge.dedicated_bundles("judge", "x") == (
        DedicatedBundles("judge", 4, ranks_per_engine=2),
    )
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
        with pytest.raises(ConfigError, match="for dedicated scoring models") as refused:
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
    with pytest.raises(ConfigError, match="engines and scoring models"):
        PostTrainRecipe.model_validate({**sampled, "grpo_reward": three})
    recipe = GRPORecipe.model_validate(
        {**measured, "environment": MODEL, "cluster": {"shape": "cluster", "num_workers": 4}}
    )
    assert [each.number for each in recipe.dedicated_bundles] == [2, 3]


def test_a_reward_model_has_its_own_actors_or_the_environment_has() -> None:
    workers = {"environment_workers": EnvironmentWorkers().model_dump()}
    for kind in (RolloutSettings, GRPORecipe):
        kind.model_validate({"environment": {"kind": "reward_model", "model": "any"}, **workers})
        with pytest.raises(ConfigError, match="starts its own actors") as refused:
            kind.model_validate({"environment": MODEL, **workers})
        assert "environment.placement.own" in refused.value.got


@pytest.mark.parametrize("judge_first", [True, False])
def test_judge_of_the_run_is_refused_in_actors_in_any_section(judge_first: bool) -> None:
    workers = {"environment_workers": EnvironmentWorkers().model_dump()}
    parts = [{"environment": each} for each in ([JUDGE, MODEL] if judge_first else [MODEL, JUDGE])]
    both = {"kind": "weighted_sum", "parts": parts}
    for environment in (both, JUDGE):
        with pytest.raises(
            ConfigError, match="an actor of the environment cannot start"
        ) as refused:
            RolloutSettings.model_validate({"environment": environment, **workers})
        assert "judge: {kind: endpoint}" in refused.value.fix


@pytest.mark.parametrize(
    ("placement", "problem"),
    [("own", "colocated, or {own: 4}"), ({"own": 0}, "greater than 0")],
)
def test_another_placement_is_refused_by_its_path(placement: Any, problem: str) -> None:
    values = {"environment": {**JUDGE, "judge": {**JUDGE["judge"], "placement": placement}}}
    with pytest.raises(Exception) as caught:
        RolloutSettings.model_validate(values)
    shown = str(caught.value if isinstance(caught.value, ConfigError) else
                describe(caught.value, values))  # fmt: skip
    assert "environment" in shown
    assert "judge.placement" in shown
    assert problem in shown


@pytest.mark.parametrize(
    ("cluster", "settings", "share"),
    [
        ({"shape": "cluster"}, {"placement": OWN}, 0.9),
        ({"shape": "cluster"}, {"placement": OWN, "gpu_memory_utilization": 0.3}, 0.3),
        ({"shape": "cluster"}, {}, 0.5),
        ({}, {"placement": OWN}, 0.5),
    ],
)
def test_judge_uses_most_of_its_dedicated_gpus(
    cluster: dict[str, Any], settings: dict[str, Any], share: float
) -> None:
    judge = {"kind": "model", "model": "folder", **settings}
    values = {"environment": {"kind": "llm_judge", "judge": judge}, "cluster": cluster}
    environment = GRPORecipe.model_validate(values).environment
    assert isinstance(environment, LLMJudge)
    assert isinstance(environment.judge, JudgeModel)
    assert environment.judge.gpu_memory_utilization == share


def test_a_machine_is_divided_between_trainer_and_scorers() -> None:
    def cluster_of(**values: Any) -> Any:
        return defaults_of_pretrained(
            values,
            algorithm=GRPOConfig.algorithm,
            samples=True,
            context=DefaultsContext(num_gpus=8),
        )["cluster"]

    assert cluster_of(environment=JUDGE) == {"shape": "node_8gpu", "num_workers": 6}
    dedicated = {"placement": {"own": 1}}
    assert cluster_of(environment=MODEL, generation=dedicated)["num_workers"] == 6
    assert cluster_of(environment={"kind": "exact"})["num_workers"] == 8
    assert cluster_of(environment={"kind": "not known"})["num_workers"] == 8
