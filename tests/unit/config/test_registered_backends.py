"""Custom backends in a recipe or in Python, with a validated section."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import SFTTrainer
from nemo_rl_core.backends import get_training_backend, register_training_backend
from nemo_rl_core.backends.generation.base import _GENERATION_BACKENDS
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.registered import import_user_module
from nemo_rl_core.config.training import TRAINING_SECTIONS, DTensorTraining, RegisteredTraining
from nemo_rl_core.errors import ConfigError
from tasks.plan_tasks.grpo import plan_grpo
from tasks.recipes.common import RecipeError
from tasks.recipes.grpo import GRPORecipe

MODULE = '''
"""A custom backend."""
from typing import Literal

from pydantic import PositiveInt

import neighbor_of_{name}
from nemo_rl_core.backends import register_generation_backend, register_training_backend
from nemo_rl_core.config.generation import RegisteredGeneration
from nemo_rl_core.config.training import RegisteredTraining


class ShardTraining(RegisteredTraining):
    backend: Literal["{name}"] = "{name}"
    num_shards: PositiveInt = 1


@register_training_backend("{name}", config=ShardTraining)
class Backend:
    """Trains."""


@register_generation_backend("{name}")
class Engine:
    """Completes."""

    def update_weights(self, state_dict):
        """Takes weights."""
'''
_numbers = iter(range(1000))


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (_TRAINING_BACKENDS, _GENERATION_BACKENDS):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for table in (TRAINING_SECTIONS, GENERATION_SECTIONS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Module in the current directory, not yet imported, that registers a backend."""
    name = f"backend_of_mine_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / f"neighbor_of_{name}.py").write_text("FACTOR = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    for each in (name, f"neighbor_of_{name}"):
        sys.modules.pop(each, None)


def recipe(**sections: Any) -> GRPORecipe:
    return GRPORecipe.model_validate({"recipe": "grpo_arithmetic", **sections})


def test_a_recipe_names_a_backend_and_the_module_that_registers_it(module: str) -> None:
    training = {"backend": module, "module": module, "num_shards": 3}
    engine = {"backend": module, "max_new_tokens": 5}
    validated = recipe(training=training, generation=engine)
    assert type(validated.training).__name__ == "ShardTraining"
    assert validated.training.num_shards == 3
    assert get_training_backend(module) is sys.modules[module].Backend
    assert validated.generation.module == module  # imported by now
    # Stages read the recipe from JSON.
    assert GRPORecipe.model_validate_json(validated.model_dump_json()) == validated


def test_python_can_name_a_custom_backend(module: str) -> None:
    import_user_module(module)
    settings = SFTTrainer.from_pretrained(
        "m", training={"backend": module, "num_shards": 2}
    ).settings
    assert settings.training.num_shards == 2
    assert settings.model_dump(mode="json")["training"]["num_shards"] == 2  # as recorded


def test_the_source_of_a_backend_is_part_of_the_key_of_what_trains(
    module: str, tmp_path: Path
) -> None:
    validated = recipe(training={"backend": module, "module": module})

    def settings() -> tuple[Any, Any]:
        plan = plan_grpo(config=validated)
        return plan.grpo.model_dump(mode="json"), plan.evaluation.model_dump(mode="json")

    trained, evaluated = settings()
    assert trained["training"]["source"]
    (tmp_path / f"neighbor_of_{module}.py").write_text("FACTOR = 2\n")
    trained_now, evaluated_now = settings()
    assert trained_now["training"]["source"] != trained["training"]["source"]
    assert evaluated_now == evaluated


def misspelt(name: str) -> dict[str, Any]:
    return {"backend": name, "module": name, "num_shard": 2}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (lambda name: {"training": {"backend": "custm"}}, "name the module that registers it"),
        (lambda name: {"training": {"backend": "dtensr"}}, "did you mean 'dtensor'?"),
        (
            lambda name: {"training": {"backend": "other", "module": name}},
            "does not register it (@register_training_backend)",
        ),
        (
            lambda name: {"training": {"backend": name, "module": "nowhere"}},
            "must be nowhere.py in the current directory",
        ),
        (lambda name: {"training": misspelt(name)}, "did you mean 'num_shards'?"),
        (
            lambda name: {"training": {"backend": name, "module": name, "num_shards": 0}},
            "training.num_shards: Input should be greater than 0",
        ),
        (
            lambda name: {"generation": {"backend": name, "module": name, "beams": 2}},
            "to register_generation_backend(name, config=...)",
        ),
    ],
)
def test_oversized_requests_are_refused(
    module: str, section: Callable[[str], dict[str, Any]], words: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(**section(module))
    assert words in str(refused.value)


def test_a_backend_without_a_config_does_not_split_the_model() -> None:
    @register_training_backend("whole_only")
    class Backend:
        """Trains on one rank."""

    assert recipe(training={"backend": "whole_only"}).training == RegisteredTraining(
        backend="whole_only", module=__name__
    )
    with pytest.raises(RecipeError, match="remove the parallel sizes"):
        recipe(training={"backend": "whole_only", "tensor_parallel_size": 2})


def test_a_config_of_another_kind_is_refused_at_registration() -> None:
    class Section(DTensorTraining):
        """Not a section of a registered backend."""

    wrong: Any = Section
    with pytest.raises(ConfigError, match="has the wrong base class"):
        register_training_backend("sectioned", config=wrong)(object)


def test_an_installed_package_announces_its_backend(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
    group = "nemo_rl_core.training_backends"
    (package / "entry_points.txt").write_text(f"[{group}]\n{module} = {module}:Backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    validated = recipe(training={"backend": module, "num_shards": 2})
    assert (validated.training.num_shards, validated.training.module) == (2, module)
