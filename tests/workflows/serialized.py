"""Serializes all workflows, tasks and launch plans in a separate process; a script.

    python -m tests.workflows.serialized FOLDER

In a process that has run tests, flytekit would keep their image names, notification addresses and
dynamic graphs.
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
    """Registered entities by name."""

    tasks: dict[str, TaskSpec] = field(default_factory=dict)
    workflows: dict[str, WorkflowSpec] = field(default_factory=dict)
    plans: dict[str, LaunchPlan] = field(default_factory=dict)

    def stage(self, name: str) -> Any:
        """Returns the template of `tasks.MODULE.FUNCTION`, by `MODULE` if both names are equal."""
        module, _, function = name.partition(".")
        return self.tasks[f"tasks.{module}.{function or module}"].template


KINDS: dict[str, tuple[type, type]] = {
    "tasks": (PythonTask, TaskSpec),
    "workflows": (WorkflowBase, WorkflowSpec),
    "plans": (flytekit.LaunchPlan, LaunchPlan),
}


def serialized(folder: Path, environment: Mapping[str, str]) -> Package:
    """Serializes the package in a new process.

    Args:
        folder: Folder for the results.
        environment: Environment variables of the process.
    """
    command = [sys.executable, "-m", "tests.workflows.serialized", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, env=dict(environment), check=True)
    package = Package()
    for kind, (_, proto) in KINDS.items():
        for file in (folder / kind).iterdir():
            getattr(package, kind)[file.name] = proto.FromString(file.read_bytes())
    return package


def _serialize(folder: Path) -> None:
    """Serializes as `pyflyte package` does, except for tasks that were made for a shape."""
    import workflows
    from tasks.ray_cluster.ray_stage import by_shape

    for module in pkgutil.iter_modules(workflows.__path__):
        importlib.import_module(f"workflows.{module.name}")
    models: OrderedDict[Any, Any] = OrderedDict()
    for entity in [*FlyteEntities.entities, *flytekit.LaunchPlan.CACHE.values()]:
        if getattr(entity, "task_resolver", None) is not by_shape:
            get_serializable(models, SETTINGS, entity)
    for kind, (entities, _) in KINDS.items():
        (folder / kind).mkdir()
        for entity, model in models.items():
            if isinstance(entity, entities):
                content = model.to_flyte_idl().SerializeToString()
                (folder / kind / entity.name).write_bytes(content)


if __name__ == "__main__":
    _serialize(Path(sys.argv[1]))
