"""Registering a workflow, and `--help`, must be quick: heavy libraries stay out."""

from collections.abc import Callable

import pytest

HEAVY = {"torch", "vllm", "ray", "transformers", "datasets", "reasoning_gym", "math_verify"}


def loaded(python: Callable[..., str], *modules: str) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return {name.split(".")[0] for name in python(script).split()}


@pytest.mark.parametrize(
    "module", ["workflows.grpo", "tasks.grpo_iteration", "tasks.experiment", "tasks.recorder"]
)
def test_a_workflow_imports_nothing_heavy(python: Callable[..., str], module: str) -> None:
    found = HEAVY & loaded(python, module)
    # What flytekit and its Ray plugin import by themselves is not ours to leave out.
    assert found <= HEAVY & loaded(python, "flytekit", "flytekitplugins.ray")


def test_torch_and_the_engine_are_not_imported_at_all(python: Callable[..., str]) -> None:
    assert not {"torch", "vllm"} & loaded(python, "workflows.grpo")
