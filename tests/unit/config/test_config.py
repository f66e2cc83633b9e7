"""Recipes: sparse, closed to unknown keys, free of contradictions, and frozen."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSchedule
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import ModelFromConfig, PretrainedModel
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.errors import ConfigError
from tasks.recipes import common
from tasks.recipes.common import PipelineRecipe, RecipeError
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.evaluate import EvaluateRecipe, RegressionRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.reward_model import RewardModelRecipe
from tasks.recipes.sft import SFTRecipe
from tasks.recipes.sweep import SweepRecipe

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPES = sorted((REPOSITORY / "workflows" / "recipes").glob("*.yaml"))
EXPERIMENTS = {
    "convert": ConvertRecipe,
    "distill": DistillationRecipe,
    "dpo": DPORecipe,
    "evaluate": EvaluateRecipe,
    "grpo": GRPORecipe,
    "post_train": PostTrainRecipe,
    "ppo": PPORecipe,
    "regression": RegressionRecipe,
    "reward_model": RewardModelRecipe,
    "sft": SFTRecipe,
    "sweep": SweepRecipe,
}


def experiment_of(path: Path) -> type[PipelineRecipe]:
    """A recipe is called after the workflow that it is for."""
    (kind,) = [kind for name, kind in EXPERIMENTS.items() if path.stem.startswith(f"{name}_")]
    return kind


@pytest.mark.parametrize(
    ("recipe", "path", "suggestion"),
    [
        ({"generatoin": {}}, "generatoin", "did you mean 'generation'?"),
        ({"grpo": {"learning_rat": 1e-3}}, "grpo.learning_rat", "did you mean 'learning_rate'?"),
        ({"data": {"kind": "arithmetic", "num_trian": 9}}, "data.num_trian", "mean 'num_train'?"),
        ({"grpo": {"loss": {"clip_hihg": 0.3}}}, "grpo.loss.clip_hihg", "mean 'clip_high'?"),
        ({"grpo": {"loss": {"kl": {"betta": 0}}}}, "grpo.loss.kl.betta", "did you mean 'beta'?"),
        ({"model": {"kind": "from_config", "num_layer": 2}}, "model.num_layer", "'num_layers'?"),
        ({"model": {"name": "x", "dtipe": "float32"}}, "model.dtipe", "did you mean 'dtype'?"),
        ({"zzz": 1}, "zzz", "remove it"),
    ],
)
def test_an_unknown_key_is_named_with_its_path(recipe: dict, path: str, suggestion: str) -> None:
    with pytest.raises(RecipeError) as caught:
        GRPORecipe.model_validate(recipe)
    got = path.rpartition(".")[2]
    assert f"unknown key {path!r}" in caught.value.message
    assert suggestion in caught.value.message.partition("fix:")[2]
    assert f"  got: {got}" in caught.value.message.splitlines()
    assert caught.value.exit_code == 2
    assert len(caught.value.message.splitlines()) < 10


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            {"grpo": {"num_generations_per_prompt": 1}},
            ["num_generations_per_prompt is 1", "group_normalized", "use at least 2"],
        ),
        (
            # 3 prompts x 4 completions = 12 sequences, which 5 does not divide.
            {
                "grpo": {
                    "num_prompts_per_step": 3,
                    "num_generations_per_prompt": 4,
                    "train_global_batch_size": 5,
                }
            },
            ["train_global_batch_size (5)", "num_generations_per_prompt (12)"],
        ),
        (
            # Operands 0..9 make 10 x 10 = 100 sums; 90 + 11 = 101 are requested.
            {
                "data": {
                    "kind": "arithmetic",
                    "num_train": 90,
                    "num_validation": 11,
                    "max_operand": 9,
                }
            },
            ["101", "only 100 different sums exist"],
        ),
        (
            {"model": {"kind": "from_config", "hidden_size": 30, "num_heads": 4}},
            ["num_heads (4) must divide hidden_size (30)"],
        ),
        (
            {"model": {"kind": "from_config", "num_heads": 4, "num_kv_heads": 3}},
            ["be a multiple of num_kv_heads (3)"],
        ),
        ({"grpo": {"advantage": {"kind": "gropu"}}}, ["grpo.advantage", "gropu"]),
        ({"cluster": {"shape": "laptp"}}, ["cluster.shape", "laptop", "got: 'laptp'"]),
        ({"seed": -1}, ["seed", "greater than or equal to 0", "got: -1"]),
        ({"generation": {"temperature": -1}}, ["  generation.temperature: ", "equal to 0"]),
        ({"evaluation": {"confidence": 95}}, ["evaluation.confidence", "less than 1", "got: 95"]),
        ({"environment": {"kind": "function", "target": "my_reward"}}, ["environment", "target"]),
        ({"sft": {"num_steps": 0}}, ["sft.num_steps", "greater than 0", "got: 0"]),
    ],
)
def test_a_contradiction_is_refused_when_the_recipe_is_loaded(
    recipe: dict, words: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        GRPORecipe.model_validate(recipe)
    for word in [*words, "fix:"]:
        assert word in caught.value.message
    assert "got: {" not in caught.value.message  # a section would be cut off
    assert len(caught.value.message.splitlines()) < 10
    assert caught.value.exit_code == 2


def test_all_sums_can_be_used_but_not_more() -> None:
    ArithmeticData(num_train=99, num_validation=1, max_operand=9)
    with pytest.raises(ValidationError, match="only 100 different sums"):
        ArithmeticData(num_train=99, num_validation=2, max_operand=9)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "arithmetic"},
        {"kind": "reasoning_gym"},
        {"kind": "file", "train": "a.jsonl", "validation": "b"},
        {"kind": "hub", "name": "organization/name"},
    ],
)
def test_every_kind_of_data_has_row_policies(data: dict) -> None:
    loaded = GRPORecipe(data={**data, "overlong": "drop", "max_sequence_tokens": 9}).data
    assert isinstance(loaded, RowPolicy)
    assert (loaded.overlong, loaded.max_sequence_tokens) == ("drop", 9)
    assert (loaded.duplicates, loaded.mask) == ("refuse", "all_assistant_turns")
    assert loaded.max_prompt_tokens > 0
    with pytest.raises(RecipeError, match="overlong"):
        GRPORecipe(data={**data, "overlong": "cut"})


def test_a_batch_of_all_sequences_and_of_a_divisor_is_accepted() -> None:
    config = GRPOConfig(num_prompts_per_step=3, num_generations_per_prompt=4)
    assert config.num_sequences_per_step == 12
    assert config.replace(train_global_batch_size=6).train_global_batch_size == 6


def test_all_problems_are_listed() -> None:
    values = {"num_steps": 0, "global_batch_size": 0, "learning_rate": -3, "adam_beta1": 2}
    with pytest.raises(ValidationError) as caught:
        SFTConfig.model_validate(values)
    lines = str(describe(caught.value, values)).splitlines()
    assert len(lines) == 6  # a heading, four problems, fix
    assert {line.split(":")[0].strip() for line in lines[1:5]} == set(values)
    assert "  learning_rate: Input should be greater than 0 (got -3)" in lines


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"environment": {"kind": "function", "target": "a b"}},
            "environment.target: must be module:function, as in my_rewards:score",
        ),
        ({"environment": {"kind": "mathh"}}, "there is no kind 'mathh'; did you mean 'math'?"),
        (
            {"grpo": {"loss": {"kind": "x"}}},
            "grpo.loss: there is no kind 'x'; it is one of clipped",
        ),
    ],
)
def test_patterns_and_kinds_have_readable_messages(values: dict, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        GRPORecipe.model_validate({"recipe": "grpo_arithmetic", **values})
    assert problem in str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_checked_in_recipe_loads(path: Path) -> None:
    experiment_of(path).model_validate(yaml.safe_load(path.read_text()))


def test_keys_next_to_a_base_recipe_override_it() -> None:
    base = GRPORecipe.model_validate({"recipe": "grpo_arithmetic"})
    changed = GRPORecipe.model_validate(
        {"recipe": "grpo_arithmetic", "seed": 3, "grpo": {"num_iterations": 1}, "sft": None}
    )
    expected = base.model_dump() | {"seed": 3, "sft": None}
    expected["grpo"]["num_iterations"] = 1
    assert changed.model_dump() == expected


def test_map_of_another_kind_replaces_the_base_map(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("data: {kind: arithmetic, num_train: 5, num_validation: 5}")
    other = {"kind": "reasoning_gym", "num_validation": 3}
    recipe = GRPORecipe.model_validate({"recipe": str(base), "data": other})
    # No setting of the sums remains: num_train is the default of reasoning-gym data.
    assert (recipe.data.kind, recipe.data.num_train, recipe.data.num_validation) == (
        "reasoning_gym",
        1024,
        3,
    )
    same = GRPORecipe.model_validate({"recipe": str(base), "data": {"num_validation": 3}})
    assert (same.data.num_train, same.data.num_validation) == (5, 3)


def test_an_unknown_base_lists_the_choices() -> None:
    with pytest.raises(RecipeError, match="there is no recipe 'grpo_arithmetics'") as caught:
        GRPORecipe.model_validate({"recipe": "grpo_arithmetics"})
    assert "grpo_arithmetic" in caught.value.message.partition("expected:")[2]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_checked_in_recipes_contain_only_differences(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings chosen for a pretrained model are not defaults: a checked-in recipe states them.
    monkeypatch.setattr(common, "_chosen_settings", lambda *_: {})
    recipe = yaml.safe_load(path.read_text())
    experiment = experiment_of(path)
    loaded = experiment.model_validate(recipe)
    repeated = [
        ".".join(keys)
        for keys in _leaves(recipe)
        if _loads_as(experiment, _without(recipe, keys), loaded)
    ]
    assert repeated == []


def _loads_as(
    experiment: type[PipelineRecipe], recipe: dict[str, Any], loaded: PipelineRecipe
) -> bool:
    try:
        return experiment.model_validate(recipe) == loaded
    except (RecipeError, ConfigError):
        return False  # the recipe is invalid without it, so it is not redundant


def _leaves(values: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns paths of all redundant values; kinds are kept, as they determine the other keys."""
    results: list[tuple[str, ...]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            results += [(key, *rest) for rest in _leaves(value)]
        elif key not in ("kind", "name", "package", "recipe"):
            results.append((key,))
    return results


def _without(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = keys
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    return {**values, first: _without(values[first], tuple(rest))}


def test_some_recipes_exist() -> None:
    assert "grpo_arithmetic" in {path.stem for path in RECIPES}


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_an_iteration_does_not_depend_on_the_number_of_iterations(one: int, other: int) -> None:
    schedules = [GRPOSchedule(num_iterations=number, learning_rate=2e-4) for number in (one, other)]
    first, second = (schedule.iteration for schedule in schedules)
    assert first == second
    assert first.learning_rate == 2e-4
    assert "num_iterations" not in first.model_dump()


def test_an_iteration_keeps_every_other_setting() -> None:
    schedule = GRPOSchedule(num_steps_per_iteration=7, advantage={"kind": "leave_one_out"})
    kept = {key: value for key, value in schedule.model_dump().items() if key != "num_iterations"}
    assert schedule.iteration.model_dump() == kept


def test_configs_are_frozen() -> None:
    config = GRPORecipe()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.grpo.loss.clip_low = 0.1


def test_a_replaced_value_is_checked_and_the_original_kept() -> None:
    config = ClusterConfig(num_threads=1)
    assert config.replace(num_threads=2) == ClusterConfig(num_threads=2)
    assert config.num_threads == 1
    with pytest.raises(ConfigError, match="num_threads"):
        config.replace(num_thread=2)
    with pytest.raises(ValidationError):
        config.replace(num_threads=0)


def test_a_model_without_a_kind_is_a_pretrained_one() -> None:
    assert GRPORecipe(model={"name": "some/model"}).model == PretrainedModel(name="some/model")
    assert isinstance(GRPORecipe(model={"kind": "from_config"}).model, ModelFromConfig)
    with pytest.raises(RecipeError):
        GRPORecipe(model={})


def test_reading_a_recipe_again_gives_the_same() -> None:
    config = GRPORecipe(sft=SFTConfig(num_steps=3), data={"kind": "arithmetic"}, seed=4)
    assert GRPORecipe.model_validate(config.model_dump(mode="json")) == config


def test_configs_import_no_torch() -> None:
    modules = [f"nemo_rl_core.config.{path.stem}" for path in _config_modules()]
    modules += ["nemo_rl_core.algorithms.grpo.config", "nemo_rl_core.algorithms.sft.config"]
    script = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "nemo_rl_core.config.base" in loaded
    assert not {"torch", "ray", "vllm", "flytekit", "transformers"} & set(loaded)


def _config_modules() -> list[Path]:
    return sorted((REPOSITORY / "nemo_rl_core" / "config").glob("[a-z]*.py"))
