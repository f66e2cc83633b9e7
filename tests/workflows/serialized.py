"""Serializes all workflows, tasks and launch plans in a process of its own; a script.

python -m tests.workflows.serialized FOLDER

A process in which tests have run has other images (flytekit keeps their names), addresses of
notices and graphs of dynamics.
"""

import importlib
import pkgutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flytekit
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import FlyteEntities
from flytekit.core.workflow import WorkflowBase
from flytekit.tools.translator import get_serializable

from tests.commands import REPOSITORY

SETTINGS = SerializationSettings(
    image_config=ImageConfig(default_image=Image("default", "unused", "1"), images=[]),
    project="flow",
    domain="development",
    version="v1",
)


@dataclass(frozen=True)
class Package:
    """What is registered, by name."""

    tasks: dict[str, TaskSpec] = field(default_factory=dict)
    workflows: dict[str, WorkflowSpec] = field(default_factory=dict)
    plans: dict[str, LaunchPlan] = field(default_factory=dict)

    def stage(self, name: str) -> Any:
        """The template of `tasks.MODULE.FUNCTION`, by `MODULE` where both have one name."""
        module, _, function = name.partition(".")
        return self.tasks[f"tasks.{module}.{function or module}"].template


KINDS: dict[str, tuple[type, type]] = {
    "tasks": (PythonTask, TaskSpec),
    "workflows": (WorkflowBase, WorkflowSpec),
    "plans": (flytekit.LaunchPlan, LaunchPlan),
}


def serialized(folder: Path, environment: Mapping[str, str]) -> Package:
    """The package as a new process makes it.

    Args:
        folder: For the results.
        environment: Of the process.
    """
    command = [sys.executable, "-m", "tests.workflows.serialized", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, env=dict(environment), check=True)
    package = Package()
    for kind, (_, proto) in KINDS.items():
        for file in (folder / kind).iterdir():
            getattr(package, kind)[file.name] = proto.FromString(file.read_bytes())
    return package


def _serialize(folder: Path) -> None:
    """As `pyflyte package` does, but for tasks that are made for a shape."""
    import workflows
    from tasks.platform.ray_stage import by_shape

    for module in pkgutil.iter_modules(workflows.__path__):
        importlib.import_module(f"workflows.{module.name}")
    found: OrderedDict[Any, Any] = OrderedDict()
    for entity in [*FlyteEntities.entities, *flytekit.LaunchPlan.CACHE.values()]:
        if getattr(entity, "task_resolver", None) is not by_shape:
            get_serializable(found, SETTINGS, entity)
    for kind, (entities, _) in KINDS.items():
        (folder / kind).mkdir()
        for entity, model in found.items():
            if isinstance(entity, entities):
                content = model.to_flyte_idl().SerializeToString()
                (folder / kind / entity.name).write_bytes(content)


if __name__ == "__main__":
    _serialize(Path(sys.argv[1]))
