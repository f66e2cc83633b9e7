"""Errors name all unknown keys with their paths, and suggest only names that are clearly meant."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.config.environment import WeightedSum
from nemo_rl_core.config.sections import unknown_keys
from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import Recipe, RecipeError
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.sweep import SweepRecipe

HEADING = "the configuration is not valid:"
FIX = "  fix: change the named values"


def refused(recipe: dict[Any, Any], kind: type[Recipe] = GRPORecipe) -> list[str]:
    """Returns the lines of the error."""
    with pytest.raises(RecipeError) as caught:
        kind.model_validate(recipe)
    return caught.value.message.splitlines()


def fix_of(recipe: dict[Any, Any], kind: type[Recipe] = GRPORecipe) -> str:
    return refused(recipe, kind)[-1].removeprefix("  fix: ")


def test_full_message_of_one_key() -> None:
    assert refused({"environment": {"kind": "regex", "patern": "x"}}) == [
        "unknown key 'environment.patern'",
        "  expected: one of kind, match, match_timeout_seconds, pattern",
        "  got: patern",
        "  fix: did you mean 'pattern'?",
    ]


def test_dozens_of_keys_are_listed_only_without_a_suggestion() -> None:
    assert refused({"grpo": {"lerning_rate": 1}}) == [
        "unknown key 'grpo.lerning_rate'",
        "  got: lerning_rate",
        "  fix: did you mean 'learning_rate'?",
    ]
    expected = refused({"grpo": {"zzz": 1}})[1].removeprefix("  expected: one of ").split(", ")
    assert {"learning_rate", "preset", "num_iterations"} < set(expected)


def test_every_mistake_is_named_at_once() -> None:
    recipe = {
        "generatoin": {},
        "grpo": {"lerning_rate": 0.1, "loss": {"kind": "gspo", "clip_lwo": 0.1}},
        "generation": {"temperature": -1},
        "seed": "one",
    }
    lines = refused(recipe)
    assert (lines[0], lines[-1]) == (HEADING, FIX)
    assert lines[1:4] == [
        "  generatoin: unknown key; did you mean 'generation'?",
        "  grpo.lerning_rate: unknown key; did you mean 'learning_rate'?",
        "  grpo.loss.clip_lwo: unknown key; did you mean 'clip_low'?",
    ]
    assert sorted(line.split(":")[0].strip() for line in lines[4:-1]) == [
        "generation.temperature",
        "seed",
    ]


def test_two_keys_of_one_section() -> None:
    assert refused({"sft": {"num_step": 3, "batch": 4}})[1:-1] == [
        "  sft.num_step: unknown key; did you mean 'num_steps'?",
        "  sft.batch: unknown key; one of adam_beta1, adam_beta2, adam_epsilon, global_batch_size, "
        "keep_best, keep_latest, learning_rate, loss, max_grad_norm, max_tokens_per_microbatch, "
        "moments, num_steps, num_warmup_steps, save_every_num_steps, schedule, "
        "validate_every_num_steps, weight_decay",
    ]


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        ({"learning_rate": 1e-3}, "'learning_rate' belongs to sft or grpo"),
        ({"grpo": {"seed": 1}}, "'seed' belongs at the top"),
        ({"grpo": {"beta": 0.1}}, "'beta' belongs to grpo.loss.kl"),
        ({"grpo": {"loss": {"temperature": 1}}}, "'temperature' belongs to generation"),
        ({"clip_low": 0.1, "grpo": {"loss": {"kind": "reinforce"}}}, "remove it"),
        ({"clip_low": 0.1}, "'clip_low' belongs to grpo.loss"),
    ],
)
def test_key_of_another_level_names_that_level(recipe: dict[str, Any], fix: str) -> None:
    assert fix_of(recipe) == fix


def test_a_key_of_several_sections_names_them_all() -> None:
    assert fix_of({"learning_rate": 1}, PostTrainRecipe) == (
        "'learning_rate' belongs to sft, reward_model, dpo or grpo"
    )


def test_kind_has_no_section_hint() -> None:
    assert fix_of({"grpo": {"kind": "grpo"}}) == "remove it"


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        (
            {"grpo": {"loss": {"kind": "reinforce", "clip_low": 0.1}}},
            "'clip_low' belongs to kind clipped, cispo or gspo",
        ),
        (
            {"generation": {"backend": "hf", "kv_cache_gib": 2}},
            "'kv_cache_gib' belongs to backend vllm",
        ),
        ({"environment": {"kind": "exact", "pattern": "x"}}, "'pattern' belongs to kind regex"),
    ],
)
def test_a_key_of_another_variant_names_the_variant(recipe: dict[str, Any], fix: str) -> None:
    assert fix_of(recipe) == fix


def test_key_of_another_section_is_not_a_misspelling() -> None:
    part = {"weights": 2, "environment": {"kind": "exact"}}
    recipe = {"environment": {"kind": "weighted_sum", "parts": [part]}}
    assert fix_of(recipe) == "'weights' belongs to training; here there is 'weight'"


@pytest.mark.parametrize("key", ["top_l", "min_tokens", "num_prompts", "adam_beta3", "zzz"])
def test_unclear_names_have_no_suggestion(key: str) -> None:
    (found,) = unknown_keys(GRPORecipe, {"grpo": {key: 1}})
    assert (found.dotted, found.hint) == (f"grpo.{key}", None)


def test_items_of_lists_and_optional_sections_are_checked() -> None:
    parts = [
        {"environment": {"kind": "exact"}},
        {"weigth": 2, "environment": {"kind": "regex", "pattern": "x", "flags": "i"}},
    ]
    overlong = {"buffer": 3, "buffer_tokens": 2}
    recipe = {
        "environment": {"kind": "weighted_sum", "parts": parts},
        "grpo": {"overlong": overlong, "loss": {"reduction": {"kind": "constant", "max": 3}}},
    }
    assert [each.dotted for each in unknown_keys(GRPORecipe, recipe)] == [
        "environment.parts.1.weigth",
        "environment.parts.1.environment.flags",
        "grpo.loss.reduction.max",
        "grpo.overlong.buffer",
    ]


def test_consequences_of_an_unknown_key_are_not_reported() -> None:
    # The pattern is missing because it is misspelt.
    assert refused({"environment": {"kind": "regex", "pattrn": "x"}})[0] == (
        "unknown key 'environment.pattrn'"
    )
    # With the default of 32 prompts, 5 would not divide 32 x 16 completions.
    grpo = {"num_promts_per_step": 5, "train_global_batch_size": 5}
    assert refused({"grpo": grpo})[0] == "unknown key 'grpo.num_promts_per_step'"
    # Another missing key is reported.
    assert refused({"data": {"kind": "hub", "trian": "a"}})[1:-1] == [
        "  data.trian: unknown key; did you mean 'train'?",
        "  data.name: Field required",
    ]


def test_a_recipe_within_a_recipe_has_paths_from_the_top(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("{seed: 3}")
    sweep = {"base": {"recipe": str(base), "grpo": {"lerning_rate": 1}}, "over": {"seed": [1]}}
    assert refused({**sweep, "confidnce": 0.9}, SweepRecipe)[1:-1] == [
        "  confidnce: unknown key; did you mean 'confidence'?",
        "  base.grpo.lerning_rate: unknown key; did you mean 'learning_rate'?",
    ]
    assert SweepRecipe.model_validate({**sweep, "base": {"recipe": str(base)}}).base.seed == 3


def test_a_base_recipe_is_checked_together_with_its_overrides(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("{grpo: {num_iteration: 3}}")
    assert refused({"recipe": str(base), "grpo": {"learning_rate": 1}})[0] == (
        f"{base}:1: unknown key 'grpo.num_iteration'"
    )


def test_custom_config_reports_the_nested_path() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'loss\.kl\.betta'"):
        GRPOConfig.model_validate({"loss": {"kl": {"betta": 1}}})
    with pytest.raises(ConfigError, match=r"unknown key 'parts\.0\.wieght'"):
        WeightedSum.model_validate({"parts": [{"wieght": 1, "environment": {"kind": "exact"}}]})
    with pytest.raises(ConfigError, match="unknown key 'num_iteration'") as caught:
        GRPOConfig().replace(num_iteration=3)
    assert caught.value.fix == "remove it"  # the config of one iteration has no num_iterations
