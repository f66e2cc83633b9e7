"""README and docs show every environment, each as a valid part of a recipe.

Blocks and sections are checked in `test_documentation.py`.
"""

import re
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from nemo_rl_core.config.environment import EnvironmentConfig
from tasks.recipes.grpo import GRPORecipe
from tests.documents import REPOSITORY, prose

PAGES = ("README.md", "docs/rewards.md", "docs/environments.md")
TEXT = "\n".join((REPOSITORY / page).read_text() for page in PAGES if (REPOSITORY / page).exists())
# `{kind: …}` by itself is an environment.
ENVIRONMENTS = sorted(set(re.findall(r"`(\{kind: [^`]*\})`", prose(TEXT))))
ADAPTER = TypeAdapter[Any](EnvironmentConfig)


@pytest.mark.parametrize("text", ENVIRONMENTS)
def test_an_environment_is_accepted(text: str) -> None:
    recipe = {"recipe": "grpo_arithmetic", "environment": yaml.safe_load(text)}
    GRPORecipe.model_validate(recipe).refuse_contradictions()


def test_every_environment_is_shown() -> None:
    kinds = set(ADAPTER.json_schema()["discriminator"]["mapping"])
    assert {yaml.safe_load(text)["kind"] for text in ENVIRONMENTS} == kinds
