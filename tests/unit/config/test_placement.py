"""Recipes with engines on dedicated bundles, and the machines of the bundles."""

from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained
from nemo_rl_core.config.generation import (
    MegatronGenerationConfig,
    SamplingConfig,
    VllmGenerationConfig,
    refuse_misplaced,
)
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.placement import DedicatedBundles, OwnPlacement, dedicated_bundles_per_node
from nemo_rl_core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "num_engines"),
    [
        ({"placement": {"own": 3}}, 3),
        ({"placement": OwnPlacement(own=3)}, 3),
        ({"placement": {"own": 8}, "tensor_parallel_size": 4}, 2),
        ({"placement": {"own": 8}, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        ({"placement": {"own": 2}, "num_engines": 2}, 2),
        ({"placement": "colocated"}, 1),
        ({"num_engines": 4}, 4),
    ],
)
def test_dedicated_bundles_determine_the_number_of_engines(
    values: dict[str, Any], num_engines: int
) -> None:
    config = VllmGenerationConfig.model_validate(values)
    assert config.num_engines == num_engines
    placement = values.get("placement", "colocated")
    assert config.num_dedicated_bundles == (
        0 if placement == "colocated" else num_engines * config.ranks_per_engine
    )
    assert VllmGenerationConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"placement": {"own": 4}, "num_engines": 3}, 3),
        ({"placement": {"own": 5}, "tensor_parallel_size": 2}, 4),
        ({"placement": {"own": 1}, "tensor_parallel_size": 2}, 2),
    ],
)
def test_bundles_that_no_engine_fills_are_refused(values: dict[str, Any], needed: int) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronGenerationConfig.model_validate(values)
    assert f"{{own: {needed}}}" in caught.value.expected
    assert f"placement.own to {needed}" in caught.value.fix


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ("own", ["placement:", "colocated, or {own: 4}"]),
        (2, ["placement:", "colocated, or {own: 4}"]),
        ({"own": 0}, ["placement.own:", "greater than 0"]),
        ({"owns": 1}, ["placement.owns"]),
    ],
)
def test_another_placement_is_refused_by_its_path(placement: Any, problem: list[str]) -> None:
    values = {"placement": placement}
    with pytest.raises(Exception) as caught:
        SamplingConfig.model_validate(values)
    error = caught.value
    shown = str(error if isinstance(error, ConfigError) else describe(error, values))
    assert all(part in shown for part in problem), shown


@pytest.mark.parametrize(
    ("taken", "num_own", "ranks", "per_node", "expected"),
    [
        ([8], 8, 1, 8, [0, 8]),
        ([4], 4, 4, 8, [4]),
        ([8, 4], 2, 1, 8, [0, 2]),
        ([8, 4], 6, 1, 8, [0, 4, 2]),
        ([8, 6], 8, 4, 8, [0, 0, 8]),  # an engine of four stays on one machine
        ([8], 16, 16, 8, [0, 8, 8]),  # no machine has sixteen
        ([1], 3, 1, None, [3]),
    ],
)
def test_engines_fill_what_the_trainer_leaves_of_its_last_machine(
    taken: list[int], num_own: int, ranks: int, per_node: int | None, expected: list[int]
) -> None:
    bundles = DedicatedBundles("generation", num_own, ranks)
    assert dedicated_bundles_per_node(taken, bundles, num_gpus_per_node=per_node) == expected


def test_gpus_of_engines_and_scorers_are_added() -> None:
    cluster = ClusterConfig(shape="cluster", num_workers=12)
    bundles = SamplingConfig.model_validate({"placement": {"own": 8}}).dedicated_bundles
    assert (cluster.num_gpus_with(bundles), cluster.bundles_with(bundles)) == (20, [8, 8, 4])
    assert SamplingConfig().dedicated_bundles == ()
    assert (cluster.num_gpus_with(()), cluster.bundles_with(())) == (12, [8, 4])
    assert ClusterConfig().num_gpus_with(bundles) == 0  # on a laptop they are processes
    # A judge is placed after the engines, and an engine of four stays on one machine.
    judge = DedicatedBundles("judge", 3)
    split = DedicatedBundles("generation", 4, ranks_per_engine=4)
    six = ClusterConfig(shape="cluster", num_workers=6)
    assert six.bundles_with([split, judge]) == [8, 5]
    assert six.bundles_with([judge, split]) == [8, 5]
    assert six.bundles_with([split]) == [6, 4]
    assert six.num_gpus_with([split, judge]) == 13


@pytest.mark.parametrize(
    ("cluster", "own", "fix"),
    [
        ({"shape": "one_gpu"}, 1, "set cluster.shape to cluster"),
        ({"shape": "node_8gpu"}, 2, "set cluster.num_workers to 6"),
        ({"shape": "node_8gpu", "num_workers": 5}, 4, "set cluster.num_workers to 4"),
    ],
)
def test_a_shape_without_room_for_them_is_refused(
    cluster: dict[str, Any], own: int, fix: str
) -> None:
    generation = SamplingConfig.model_validate({"placement": {"own": own}})
    with pytest.raises(ConfigError) as caught:
        refuse_misplaced(ClusterConfig.model_validate(cluster), generation)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("cluster", "own"),
    [
        ({"shape": "node_8gpu", "num_workers": 4}, 4),
        ({"shape": "cluster"}, 3),
        ({"num_workers": 2}, 3),
    ],
)
def test_more_engines_than_workers_fit_dedicated_bundles(cluster: dict[str, Any], own: int) -> None:
    generation = SamplingConfig.model_validate({"placement": {"own": own}})
    refuse_misplaced(ClusterConfig.model_validate(cluster), generation)
    colocated = generation.replace(placement="colocated", num_engines=9)
    with pytest.raises(ConfigError, match="9 engines") as caught:
        refuse_misplaced(ClusterConfig.model_validate(cluster), colocated)
    assert "placement: {own: 9}" in caught.value.fix


def test_a_machine_is_divided_between_trainer_and_engines() -> None:
    defaults = defaults_of_pretrained(
        {"generation": {"placement": {"own": 2}}},
        algorithm=GRPOConfig.algorithm,
        samples=True,
        context=DefaultsContext(num_gpus=8),
    )
    assert defaults["cluster"] == {"shape": "node_8gpu", "num_workers": 6}
    assert "generation.num_engines" not in defaults
