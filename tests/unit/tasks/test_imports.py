"""Registration and `--help` must be quick, so they import no heavy library."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.commands import REPOSITORY

HEAVY = {"torch", "vllm", "ray", "transformers", "datasets", "reasoning_gym", "math_verify"}


def loaded(python: Callable[..., str], *modules: str) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return {name.split(".")[0] for name in python(script).split()}


@pytest.mark.slow
def test_a_workflow_imports_nothing_heavy(python: Callable[..., str]) -> None:
    heavy_imports = HEAVY & loaded(python, "workflows.grpo", "tasks.local_run.run")
    assert not {"torch", "vllm"} & heavy_imports
    # Modules that flytekit and its Ray plugin import themselves are allowed.
    assert heavy_imports <= HEAVY & loaded(python, "flytekit", "flytekitplugins.ray")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["nemo_rl_core", "tasks"])
def test_no_lower_package_names_a_module_of_workflows(package: str) -> None:
    """An import by name would bypass the contracts of import-linter."""
    assert [
        f"{path}:{line}"
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for line in _names_of_workflows(ast.parse(path.read_text()))
    ] == []


def _names_of_workflows(tree: ast.Module) -> Iterator[int]:
    texts = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings, which may name a workflow as an example
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Constant) and re.match(r"workflows\.\w", str(node.value))
        if is_name and node not in texts:
            yield node.lineno
        is_import = isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func)
        if is_import and "workflows" in ast.unparse(node):
            yield node.lineno


def test_a_module_of_workflows_is_found_in_an_import_by_name() -> None:
    source = '"""`workflows.grpo.grpo` is an example."""\nimport_module(f"workflows.{name}")\n'
    assert [*_names_of_workflows(ast.parse(source + 'path = "workflows.sft:sft"\n'))] == [2, 3]


def test_reading_a_recipe_imports_neither_flytekit_nor_ray(python: Callable[..., str]) -> None:
    script = (
        "import sys; from tasks.recipes.grpo import GRPORecipe;"
        "GRPORecipe.model_validate({'recipe': 'grpo_arithmetic'}); print(*sys.modules)"
    )
    loaded_packages = {name.split(".")[0] for name in python(script).split()}
    assert not {"flytekit", *HEAVY} & loaded_packages
