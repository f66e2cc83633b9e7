"""`nemo-rl keys` and `recipes`, and completion of keys."""

import json

from click.testing import CliRunner, Result

from tasks.cli.recipe.recipe_keys import completions
from tasks.recipes.recipe_file import RECIPES
from workflows import cli


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, arguments)


def test_a_key_has_a_type_and_both_defaults() -> None:
    lines = invoked("keys", "grpo").output.splitlines()
    start = next(index for index, line in enumerate(lines) if "grpo.learning_rate " in line)
    assert lines[start].split() == (
        ["grpo.learning_rate", "0.001", "(pretrained", "model:", "1e-06)", "[number", ">", "0]"]
    )
    assert lines[start + 1] == "    The highest learning rate, reached after the warm-up."
    assert invoked("keys", "seed").output.startswith("seed  0  [integer")


def test_variants_of_a_section_follow_its_shared_keys() -> None:
    shown = json.loads(invoked("keys", "grpo.loss", "--json").output)
    by_variant = {(row["variant"], row["key"]): row for row in shown}
    assert by_variant["kind: clipped", "grpo.loss.clip_low"]["default"] == "0.2"
    assert by_variant["kind: function", "grpo.loss.target"]["default"] == "required"
    sections = json.loads(invoked("keys", "--json").output)
    assert {"grpo", "model", "data", "seed"} <= {row["key"] for row in sections}
    assert all(row["meaning"] for row in sections)


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    for path, text in (
        ("grpo.lerning_rate", "there is no key in grpo 'lerning_rate'"),
        ("grpoo", "there is no key 'grpoo'"),
        ("seed.a", "there is no key in seed 'a'"),
    ):
        refused = invoked("keys", path)
        assert refused.exit_code == 2
        assert text in refused.output
    assert "did you mean 'learning_rate'?" in invoked("keys", "grpo.lerning_rate").output


def test_keys_are_completed_with_what_follows_them() -> None:
    assert completions("grpo.lear") == ["grpo.learning_rate="]
    assert "grpo." in completions("g") and "generation." in completions("g")
    assert completions("grpo.loss.clip_l") == ["grpo.loss.clip_low="]


def test_recipes_are_listed_by_pipeline() -> None:
    rows = json.loads(invoked("recipes", "--json").output)
    assert {row["recipe"] for row in rows} == {path.stem for path in RECIPES.glob("*.yaml")}
    assert all(row["about"] for row in rows)
    shown = invoked("recipes", "sweep").output
    assert "Two learning rates on two seeds" in shown
    assert "grpo_ci" not in shown
    assert "did you mean 'grpo'?" in invoked("recipes", "grop").output
