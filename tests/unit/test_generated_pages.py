"""The pages that the build writes from the code."""

import re
from typing import Annotated, Any, Literal

import pytest
from generate import commands, recipes
from generate.pipelines import pipelines
from generate.recipes import Reference
from pydantic import Field, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from tasks.cli.recipe.recipe_keys import default, meaning, tables, type_text, unit
from workflows.cli import PIPELINES


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(pipelines())


def test_no_key_is_without_a_meaning(reference: Reference) -> None:
    assert [key.path for key in reference.all_keys() if not key.meaning] == []


def test_every_recipe_and_section_has_its_place(reference: Reference) -> None:
    names = {section.name for section in reference.sections}
    assert {"model", "data", "environment", "grpo", "training", "generation"} <= names
    assert not {"baseline", "grpo_reward", "base"} & names  # told with model, environment, sweep
    paths = {key.path for key in reference.all_keys()}
    assert {"grpo.loss.clip_low", "environment.parts[].weight", "seed", "grpo.preset"} <= paths
    for pipeline in reference.pipelines:
        for key in reference.top[pipeline.name].values():
            assert not key.variants or key.path == "base" or reference.page_of(key)


@pytest.mark.slow
def test_a_page_shows_each_variant_and_each_key_once(reference: Reference) -> None:
    page = recipes.pages()["reference/recipes/grpo.md"]
    assert "### `kind: clipped` { #grpo.loss-clipped }" in page
    row = "`grpo.learning_rate` | number > 0 | `0.001`; of a pretrained model `1e-06` | "
    assert page.count(row) == 1
    assert page.count("<span id='grpo.loss.clip_low'></span>") == 1
    assert "None" not in page
    engines = recipes.pages()["reference/recipes/generation.md"]
    assert "| `8`; of a pretrained model `512` | " in engines


@pytest.mark.slow
def test_pipelines_have_the_names_that_commands_take(reference: Reference) -> None:
    assert {each.name for each in reference.pipelines} == PIPELINES.keys()
    index = recipes.pages()["reference/recipes/index.md"]
    assert all(f"| `{name}` | " in index for name in PIPELINES)


@pytest.mark.slow
def test_anchors_of_a_page_differ_and_its_links_to_them_lead_somewhere() -> None:
    for path, page in recipes.pages().items():
        ids = re.findall(r"<span id='([^']*)'>|\{ #(\S+) \}", page)
        names = [first or second for first, second in ids]
        assert len(set(names)) == len(names), path
        linked = set(re.findall(r"\]\(#([^)]*)\)", page))
        assert linked - {path.rpartition("/")[2].removesuffix(".md")} <= set(names), path


class Small(FrozenConfig):
    """One of two.

    Attributes:
        size: How large it is.
        shared: In both.
    """

    kind: Literal["small"] = "small"
    size: PositiveInt = 1
    shared: bool = False


class Large(Small):
    """The other."""

    kind: Literal["large"] = "large"  # type: ignore[assignment]
    secret: str


def test_variants_share_a_table_and_have_one_each() -> None:
    shared, small, large = tables("section", (Small, Large))
    assert [key.path for key in shared.keys] == ["section.size", "section.shared"]
    assert (small.tag, small.keys) == (("kind", "small"), ())
    assert [key.path for key in large.keys] == ["section.secret"]
    assert large.keys[0].default == "required"


def test_a_key_without_a_meaning_is_found() -> None:
    assert meaning(Large, "size") == "How large it is."
    assert meaning(Large, "secret") == ""


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (PositiveInt, "integer > 0"),
        (Annotated[float, Field(gt=0, le=1)], "number > 0, ≤ 1"),
        (Annotated[str, Field(min_length=1)] | None, "non-empty string or `null`"),
        (Literal["a", "b"], "`a` \\| `b`"),
        (list[str], "list of string"),
        (dict[str, int], "map from string to integer"),
        (Small | Large | None, "section or `null`"),
        (Annotated[str, Field(pattern="^a$")], "string matching `^a$`"),
    ],
)
def test_types_in_words(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text


class Defaults(FrozenConfig):
    """Values of every kind."""

    a: float = 1e-8
    b: str = ""
    c: Small | Large = Small(size=2)
    d: list[int] = Field(default_factory=list)
    e: None = None


def test_defaults_are_yaml() -> None:
    texts = [default(field) for field in Defaults.model_fields.values()]
    assert texts == ["`1e-08`", "`''`", "`{kind: small, size: 2}`", "`[]`", "`null`"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("call_timeout_seconds", "s"),
        ("max_prompt_tokens", "tokens"),
        ("num_prompts_per_step", "prompts per step"),
        ("num_kv_heads", "heads"),
        ("num_steps", "steps"),
        ("save_every_num_steps", "steps"),
        ("memory_mib", "MiB"),
        ("max_draws", "draws"),
        ("learning_rate", ""),
    ],
)
def test_units(name: str, words: str) -> None:
    assert unit(name) == words


def test_commands_have_their_options() -> None:
    page = commands.pages()["reference/commands/nemo-rl.md"]
    assert "## gc\n\n```text\nnemo-rl gc [OPTIONS]\n```" in page
    assert "| `--dry-run`, `-n` |  | Show the plan; remove nothing. |" in page
    assert "| `--port` `INTEGER RANGE` | `8321` |" in page
    pipelines_page = commands.pages()["reference/commands/pyflyte.md"]
    assert ".venv/bin/pyflyte run workflows/regression.py check_regression" in pipelines_page
