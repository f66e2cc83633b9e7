"""Registering a workflow, and `--help`, must be quick: heavy libraries stay out."""

from collections.abc import Callable

import pytest

HEAVY = {"torch", "vllm", "ray", "transformers", "datasets", "reasoning_gym", "math_verify"}


def loaded(python: Callable[..., str], *modules: str) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return {name.split(".")[0] for name in python(script).split()}


@pytest.mark.slow
def test_a_workflow_imports_nothing_heavy(python: Callable[..., str]) -> None:
    found = HEAVY & loaded(python, "workflows.grpo", "tasks.platform.run")
    assert not {"torch", "vllm"} & found
    # What flytekit and its Ray plugin import by themselves is not ours to leave out.
    assert found <= HEAVY & loaded(python, "flytekit", "flytekitplugins.ray")
