"""Names of TRL, NeMo RL, verl and OpenRLHF: their hints in errors and documentation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.config.peer_names import PEER_NAMES, peer_hint
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.overrides import refuse_unclaimed
from tasks.recipes.common import RecipeError
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.sft import SFTRecipe

RECIPES: list[type[BaseModel]] = [GRPORecipe, DPORecipe, PPORecipe, SFTRecipe]
PAGES = Path(__file__).parents[3] / "docs" / "coming-from"
PATH = re.compile(r"\b[a-z]\w*(?:\.[a-z]\w*)+\b")


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from classes(argument)


def has(kind: type[BaseModel], path: list[str]) -> bool:
    first, *rest = path
    if first == "preset":
        return not rest
    field = kind.model_fields.get(first)
    return field is not None and (
        not rest or any(has(inner, rest) for inner in classes(field.annotation))
    )


@pytest.mark.parametrize("name", list(PEER_NAMES))
def test_named_equivalents_exist(name: str) -> None:
    here = PEER_NAMES[name]
    for path in PATH.findall(here.replace("workflows/grpo.py", "")):
        assert any(has(kind, path.split(".")) for kind in RECIPES), path
    # The name must be unknown here, or its error could never occur. `seed` is a key at the top of a
    # recipe only, and the error in a section says so.
    assert name == "seed" or not any(name in kind.model_fields for kind in RECIPES)
    for bare in re.findall(r"(\w+), in the algorithm's section", here):
        assert bare in GRPORecipe.model_fields["grpo"].annotation.model_fields  # type: ignore[union-attr]


def rows() -> Iterator[tuple[str, str, str]]:
    """Returns page, first cell and other cells of each row of the tables."""
    for page in PAGES.glob("*.md"):
        for line in page.read_text().splitlines():
            first, *others = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if others and "`" in first:
                yield page.name, first, " ".join(others)


def test_errors_match_the_pages() -> None:
    seen = set()
    wrong = []
    for page, first, here in rows():
        for name in re.findall(r"`([\w.]+)`", first):
            leaf = name.rpartition(".")[2]
            if leaf not in PEER_NAMES:
                continue
            seen.add(leaf)
            words = set(re.findall(r"\w+", PEER_NAMES[leaf])) - {"grpo", "dpo", "in", "with"}
            if "none" not in here and not words & set(re.findall(r"\w+", here)):
                wrong.append((page, leaf, here))
    assert wrong == []
    assert len(seen) > 60


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"grpo": {"num_generations": 4}}, "here it is grpo.num_generations_per_prompt"),
        ({"grpo": {"lr": 1e-5}}, "here it is learning_rate, in the algorithm's section"),
        ({"grpo": {"max_steps": 4}}, "here it is grpo.num_iterations times"),
        ({"max_completion_length": 64}, "here it is generation.max_new_tokens"),
        ({"policy": {"model_name": "m"}}, "here it is model, training, generation"),
        ({"training": {"gradient_checkpointing": True}}, "training.activation_checkpointing"),
        ({"training": {"lora": {"r": 8}}}, "here it is training.lora.rank"),
    ],
)
def test_recipe_with_a_peer_name_gets_the_equivalent(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        GRPORecipe.model_validate({"recipe": "grpo_arithmetic", **values})
    assert hint in str(error.value)
    assert "did you mean" not in str(error.value)


def test_python_calls_suggest_the_equivalent_setting() -> None:
    with pytest.raises(ConfigError, match=r"fix: write max_new_tokens=64"):
        refuse_unclaimed(GRPOSettings, "grpo", {}, {"max_completion_length": 64})


@pytest.mark.parametrize("name", ["num_stepz", "max_step"])
def test_misspelled_name_of_another_algorithm_suggests_that_name(name: str) -> None:
    with pytest.raises(ConfigError, match="fix: write num_steps_per_iteration=3"):
        refuse_unclaimed(GRPOSettings, "grpo", {}, {name: 3})


def test_misspelled_name_is_not_an_equivalent() -> None:
    assert peer_hint("lerning_rate") is None
    with pytest.raises(RecipeError, match="did you mean 'learning_rate'"):
        GRPORecipe.model_validate({"recipe": "grpo_arithmetic", "grpo": {"lerning_rate": 1}})
